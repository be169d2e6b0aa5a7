//! Text that comes from a guest, or from a QEMU that a guest may have taken over, on its way to people and logs.

/// At most so many bytes of it, on one line, without anything that a terminal would obey.
pub(crate) fn plain(text: &str, most: usize) -> String {
    let end = (0..=most.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    text[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_it_moves_a_cursor_or_begins_a_line() {
        assert_eq!(plain("a\x1b[2Jb\nERROR c\u{9b}d", 100), "a [2Jb ERROR c d");
    }

    #[test]
    fn it_is_cut_between_characters() {
        assert_eq!(plain("é日本", 4), "é");
        assert_eq!(plain("é日本", 5), "é日");
        assert_eq!(plain("short", 100), "short");
    }
}
