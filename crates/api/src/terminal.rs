use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::TerminalId;

/// A terminal of a sandbox. It goes on for a while when its connection is lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Terminal {
    pub id: TerminalId,
    pub user: String,
    pub rows: u16,
    pub cols: u16,
    /// Whether somebody is connected to it.
    pub attached: bool,
    /// `null` while it goes on; 128 + n for a death by signal n.
    pub exit_code: Option<i32>,
    /// Of all output; `offset` of a connection counts them.
    pub output_bytes: u64,
    #[serde(with = "time::serde::rfc3339")]
    pub started_at: OffsetDateTime,
}

/// The oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TerminalList {
    pub terminals: Vec<Terminal>,
}

/// What a client says in a text message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TerminalControl {
    /// `{"resize": {"rows": 24, "cols": 80}}`
    Resize { rows: u16, cols: u16 },
    /// `{"signal": "INT"}`: to what is in the foreground.
    Signal(TerminalSignal),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum TerminalSignal {
    Hup,
    Int,
    Quit,
    Kill,
    Usr1,
    Usr2,
    Term,
    Cont,
    Stop,
    Tstp,
}

impl TerminalSignal {
    /// As Linux has it on every architecture in use.
    pub fn number(self) -> u8 {
        match self {
            Self::Hup => 1,
            Self::Int => 2,
            Self::Quit => 3,
            Self::Kill => 9,
            Self::Usr1 => 10,
            Self::Usr2 => 12,
            Self::Term => 15,
            Self::Cont => 18,
            Self::Stop => 19,
            Self::Tstp => 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_published_command_sends_is_understood() {
        let resize = r#"{"resize":{"rows":24,"cols":80}}"#;
        let parsed: TerminalControl = serde_json::from_str(resize).unwrap();
        assert_eq!(parsed, TerminalControl::Resize { rows: 24, cols: 80 });
        assert_eq!(serde_json::to_string(&parsed).unwrap(), resize);
        let parsed: TerminalControl = serde_json::from_str(r#"{"signal":"INT"}"#).unwrap();
        assert_eq!(parsed, TerminalControl::Signal(TerminalSignal::Int));
    }
}
