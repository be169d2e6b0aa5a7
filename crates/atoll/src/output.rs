//! What commands print: results on standard output, as a table or as JSON; remarks on standard error.

use std::{
    fmt::Display,
    io::{self, Write as _},
};

use comfy_table::{CellAlignment, ContentArrangement, Table};
use serde::Serialize;
use time::{OffsetDateTime, macros::format_description};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    pub(crate) json: bool,
}

impl Output {
    /// `value` for programs, or what `for_people` makes of it.
    pub(crate) fn show<T: Serialize + ?Sized>(
        self,
        value: &T,
        for_people: impl FnOnce(&T) -> String,
    ) -> io::Result<()> {
        if self.json {
            line(&serde_json::to_string_pretty(value)?)
        } else {
            line(&for_people(value))
        }
    }
}

/// Fails when the reader has gone away, which `println!` would make a panic.
pub(crate) fn line(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{}", text.trim_end_matches('\n'))?;
    stdout.flush()
}

/// Neither result nor error.
#[expect(clippy::print_stderr, reason = "remarks go beside the results")]
pub(crate) fn remark(text: impl Display) {
    eprintln!("{text}");
}

/// Columns under headings; those with a `>` before their heading are aligned to the right.
pub(crate) fn table<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = Table::new();
    table
        .load_preset(comfy_table::presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings.map(|heading| heading.trim_start_matches('>').to_uppercase()));
    table.add_rows(rows);
    for (column, heading) in table.column_iter_mut().zip(headings) {
        column.set_padding((0, 2));
        if heading.starts_with('>') {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Names and values, one a line.
pub(crate) fn properties<const N: usize>(properties: &[(&str, String); N]) -> String {
    let width = properties.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    properties
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("{name:width$}  {value}\n"))
        .collect()
}

pub(crate) fn instant(instant: OffsetDateTime) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]Z");
    instant.to_offset(time::UtcOffset::UTC).format(format).unwrap_or_default()
}

pub(crate) fn optional_instant(time: Option<OffsetDateTime>, otherwise: &str) -> String {
    time.map_or_else(|| otherwise.to_owned(), instant)
}

/// MiB, in the largest unit that leaves no fraction.
pub(crate) fn mebibytes(count: u64) -> String {
    if count >= 1024 && count.is_multiple_of(1024) {
        format!("{} GiB", count / 1024)
    } else {
        format!("{count} MiB")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_no_blanks_at_the_ends_of_its_lines() {
        let shown = table(
            ["name", ">size"],
            [["a".to_owned(), "1".to_owned()], ["long".to_owned(), "12".to_owned()]],
        );
        assert_eq!(shown, "NAME  SIZE\na        1\nlong    12\n");
    }

    #[test]
    fn sizes_are_never_rounded() {
        let shown: Vec<_> = [0, 512, 1024, 1536, 10_240].map(mebibytes).into();
        assert_eq!(shown, ["0 MiB", "512 MiB", "1 GiB", "1536 MiB", "10 GiB"]);
    }
}
