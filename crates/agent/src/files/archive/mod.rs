//! Trees of files as tar archives, streamed both ways. What is packed comes from whoever may write in the guest, what is
//! unpacked from whoever may send: the parser holds little, and no name leads out of the directory that was asked for.

pub(crate) mod header;
pub(crate) mod pack;
pub(crate) mod parse;
pub(crate) mod pax;
pub(crate) mod target;
pub(crate) mod unpack;
