//! Whose things they are: plans and what they allow, and what was used.

mod plan;
mod settings;

pub(crate) use self::plan::{Amounts, Limits};
pub use self::{
    plan::Plan,
    settings::{Plans, SettingsError},
};
