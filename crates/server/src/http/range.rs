//! The `Range` header (RFC 9110, 14.2): one range of bytes. Whatever else it holds is ignored, as the RFC allows.

use machine::guest::ReadRange;

/// `None`: the whole file.
pub(super) fn parse(header: &str) -> Option<ReadRange> {
    let (unit, set) = header.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return None;
    }
    let (first, last) = set.split_once('-')?;
    match (first.trim(), last.trim()) {
        ("", last) => number(last).map(ReadRange::Last),
        (first, "") => Some(ReadRange::From { start: number(first)?, end: None }),
        (first, last) => {
            let (start, last) = (number(first)?, number(last)?);
            (start <= last).then(|| ReadRange::From { start, end: Some(last.saturating_add(1)) })
        }
    }
}

/// Digits only: `parse` alone would take a `+`. More than there can be bytes is as good as all of them.
fn number(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    Some(text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_range_is_understood(first: u64, length in 0u64..1000) {
            let last = first.saturating_add(length);
            let from = |end| Some(ReadRange::From { start: first, end });
            prop_assert_eq!(parse(&format!("bytes={first}-{last}")), from(Some(last.saturating_add(1))));
            prop_assert_eq!(parse(&format!("Bytes= {first} - ")), from(None));
            prop_assert_eq!(parse(&format!("bytes=-{first}")), Some(ReadRange::Last(first)));
            if length > 0 {
                prop_assert_eq!(parse(&format!("bytes={last}-{first}")), None);
            }
        }

        #[test]
        fn any_header_is_parsed_or_ignored_without_a_panic(text in "(bytes=)?[0-9a-z,=+ -]{0,30}") {
            let _ = parse(&text);
        }
    }

    #[test]
    fn what_is_not_one_range_of_bytes_is_ignored() {
        for other in [
            "",
            "bytes",
            "bytes=",
            "bytes=-",
            "lines=1-2",
            "bytes=1-2,5-6",
            "bytes=+1-2",
            "bytes=a-b",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
        assert_eq!(
            parse("bytes=0-99999999999999999999999"),
            Some(ReadRange::From { start: 0, end: Some(u64::MAX) })
        );
    }
}
