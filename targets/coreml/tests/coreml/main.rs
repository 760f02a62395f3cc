//! Packages read back, executed and checked.

mod builder;
mod checks;
mod compressed;
mod damage;
mod errors;
mod exactness;
mod golden;
mod ops;
mod states;
