//! How far a copy is, on a terminal.

use std::{io::IsTerminal as _, time::Duration};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// What is over sooner shows nothing.
const SMALL: u64 = 1 << 20;

const BAR: &str = "{bytes:>10} of {total_bytes:10} {wide_bar} {binary_bytes_per_sec:>12} {eta:>5}";
const SPINNER: &str = "{spinner} {bytes:>10} {binary_bytes_per_sec:>12}";

/// Of so many bytes, if that is known.
pub(super) fn bar(size: Option<u64>) -> ProgressBar {
    if !std::io::stderr().is_terminal() || size.is_some_and(|size| size < SMALL) {
        return ProgressBar::hidden();
    }
    let (bar, template) = match size {
        Some(size) => (ProgressBar::new(size), BAR),
        None => (ProgressBar::no_length(), SPINNER),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
