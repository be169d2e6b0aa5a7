//! Whose things they are: plans and what they allow, and what was used.

mod alive;
mod period;
mod plan;
mod settings;
mod usage;

pub(crate) use self::{
    alive::Alive,
    period::Period,
    plan::{Amounts, Limits},
    usage::{Kind, Use, Used},
};
pub use self::{
    plan::Plan,
    settings::{Plans, SettingsError},
};
