//! What the end-to-end suites share: a server of their own, sandboxes that are given back, waits with a deadline.
//!
//! A suite is one test program with one server. Its claims run side by side; see [`suite!`].

mod account;
mod address;
mod answer;
mod footprint;
mod held;
mod host;
mod interrupt;
mod object_storage;
mod postgres;
mod program;
mod psql;
mod published;
mod python;
mod sandbox;
mod server;
mod sound;
mod suite;
mod wait;

pub use crate::{
    address::address_of_the_host,
    answer::{Answer, escaped},
    footprint::Footprint,
    held::{Held, from},
    host::Host,
    object_storage::ObjectStorage,
    postgres::Postgres,
    program::{failpoints_program, program},
    psql::{clock_of, psql, sql},
    published::published_command,
    python::{python_with, wheel_of},
    sandbox::{Sandbox, command, patterned, small},
    server::{End, Options, Server, pool},
    sound::{has_failed, is_sound, will_not_be_repeated},
    suite::{Claim, Length, run},
    wait::{pause, until},
};
