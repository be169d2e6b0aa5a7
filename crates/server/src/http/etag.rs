//! Lists of entity tags in `If-Match` and `If-None-Match` (RFC 9110, 13.1).

use http::{HeaderMap, HeaderName};

/// The tags with their quotes, or `*`. What is not a tag is left out: it could not match anyway.
pub(super) fn list(headers: &HeaderMap, name: &HeaderName) -> Vec<String> {
    let mut tags = Vec::new();
    for value in headers.get_all(name) {
        let Ok(mut rest) = value.to_str() else { continue };
        loop {
            rest = rest.trim_start_matches([' ', '\t', ',']);
            if rest.is_empty() {
                break;
            }
            let weak = if rest.starts_with("W/") { 2 } else { 0 };
            let end = match rest[weak..].strip_prefix('"') {
                Some(inside) => inside.find('"').map(|length| weak + length + 2),
                None => rest.find(','),
            };
            let (tag, after) = rest.split_at(end.unwrap_or(rest.len()));
            tags.push(tag.trim().to_owned());
            rest = after;
        }
    }
    tags
}

#[cfg(test)]
mod tests {
    use http::header::IF_NONE_MATCH;
    use proptest::prelude::*;

    use super::*;

    fn parsed(values: &[&str]) -> Vec<String> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(IF_NONE_MATCH, value.parse().unwrap());
        }
        list(&headers, &IF_NONE_MATCH)
    }

    proptest! {
        #[test]
        fn every_tag_of_a_list_is_found(tags in prop::collection::vec("(W/)?\"[!#-~]{0,8}\"", 1..5)) {
            prop_assert_eq!(parsed(&[&tags.join(", ")]), tags.clone());
            prop_assert_eq!(parsed(&[&tags.join(",")]), tags);
        }

        #[test]
        fn any_header_is_parsed_without_a_panic(text in "[ -~]{0,40}") {
            parsed(&[&text]);
        }
    }

    #[test]
    fn several_headers_are_one_list() {
        assert_eq!(parsed(&["\"a\", W/\"b\"", "*"]), ["\"a\"", "W/\"b\"", "*"]);
    }
}
