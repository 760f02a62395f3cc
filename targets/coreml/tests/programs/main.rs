//! Programs of parts of a model: what they look like, what they compute, what is refused, and the packages made of
//! them.

mod attention;
mod experts;
mod head;
mod interpret;
mod packages;
mod store;
mod verify;
