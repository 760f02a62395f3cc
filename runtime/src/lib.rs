//! What ships: executes a Plan.
