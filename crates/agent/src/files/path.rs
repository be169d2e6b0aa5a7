//! Paths as clients give them: absolute bytes, made plain before anything is touched.

use protocol::message::{ErrorCode, Failure};

use crate::failure::{refuse, shown};

/// The kernel's `PATH_MAX`, with the final NUL.
const LONGEST: usize = 4096;
const LONGEST_NAME: usize = 255;

/// Without `.`, `..`, doubled or trailing slashes; `..` is taken from the text, not from what links lead to.
pub(crate) fn resolve(path: &[u8]) -> Result<Vec<u8>, Failure> {
    if path.first() != Some(&b'/') {
        return Err(refuse(
            ErrorCode::Invalid,
            format!("the path {:?} is not absolute; begin it with /", shown(path)),
        ));
    }
    if path.contains(&0) {
        return Err(refuse(ErrorCode::Invalid, "a path cannot hold a NUL byte"));
    }
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            name if name.len() > LONGEST_NAME => {
                return Err(refuse(
                    ErrorCode::Invalid,
                    format!("a name is longer than {LONGEST_NAME} bytes"),
                ));
            }
            name => parts.push(name),
        }
    }
    let mut plain = Vec::with_capacity(path.len());
    for part in &parts {
        plain.push(b'/');
        plain.extend_from_slice(part);
    }
    if plain.is_empty() {
        plain.push(b'/');
    }
    if plain.len() >= LONGEST {
        return Err(refuse(
            ErrorCode::Invalid,
            format!("the path is longer than {} bytes", LONGEST - 1),
        ));
    }
    Ok(plain)
}

/// Directory and name of a path from [`resolve`]; `None` for `/`.
pub(crate) fn split(plain: &[u8]) -> Option<(&[u8], &[u8])> {
    let slash = plain.iter().rposition(|&byte| byte == b'/')?;
    let (directory, name) = (&plain[..slash], &plain[slash + 1..]);
    (!name.is_empty()).then_some((if directory.is_empty() { b"/" } else { directory }, name))
}

/// `directory` may be `/`.
pub(crate) fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(directory.len() + 1 + name.len());
    path.extend_from_slice(directory);
    if path.last() != Some(&b'/') {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let part = prop_oneof![
            Just(b"..".to_vec()),
            Just(b".".to_vec()),
            Just(Vec::new()),
            prop::collection::vec(1u8.., 1..6)
                .prop_filter("no slash", |part| !part.contains(&b'/')),
        ];
        prop::collection::vec(part, 0..12)
    }

    proptest! {
        #[test]
        fn a_resolved_path_is_plain_and_stays_so(parts in parts()) {
            let path = [b"/".to_vec(), parts.join(&b'/')].concat();
            let plain = resolve(&path).unwrap();
            prop_assert_eq!(&plain[..1], b"/");
            prop_assert!(plain == b"/" || !plain[1..].split(|&byte| byte == b'/').any(|part| matches!(part, b"" | b"." | b"..")));
            prop_assert_eq!(resolve(&plain).unwrap(), plain.clone());
            if let Some((directory, name)) = split(&plain) {
                prop_assert_eq!(join(directory, name), plain);
            }
        }
    }

    #[test]
    fn what_is_no_absolute_path_is_refused() {
        for path in [
            &b""[..],
            b"relative",
            b"/a\0b",
            &[b'/'; 1].repeat(2)[..0],
            &[b"/".to_vec(), vec![b'a'; 256]].concat(),
        ] {
            assert_eq!(resolve(path).unwrap_err().code, ErrorCode::Invalid);
        }
    }

    #[test]
    fn dots_cannot_lead_above_the_root() {
        assert_eq!(resolve(b"/../../etc/./x/..//passwd/").unwrap(), b"/etc/passwd");
    }
}
