//! End-to-end tests, as a user would run them.
