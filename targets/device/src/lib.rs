//! Device descriptions.
