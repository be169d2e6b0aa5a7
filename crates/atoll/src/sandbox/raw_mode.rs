//! The terminal that this program runs in.

use std::io;

use rustix::{
    io::Errno,
    stdio::{stdin, stdout},
    termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr},
};

/// While it lives, every key is handed over as it is.
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    pub(crate) fn enter() -> io::Result<Self> {
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // What was typed and not read stays for whoever reads next.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}

/// Rows and columns; `None` where there is no window.
pub(crate) fn window_size() -> Option<(u16, u16)> {
    let found = tcgetwinsize(stdout()).or_else(|_: Errno| tcgetwinsize(stdin())).ok()?;
    (found.ws_row > 0 && found.ws_col > 0).then_some((found.ws_row, found.ws_col))
}
