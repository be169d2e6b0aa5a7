//! A path on its way from a URL's query to the guest's file system.
//!
//! The sources are compiled in by their paths: the server itself would bring its database and its TLS along.
#![no_main]

#[path = "../../crates/agent/src/failure.rs"]
#[expect(dead_code, reason = "only refusals are used")]
mod failure;
#[path = "../../crates/server/src/http/fields.rs"]
mod fields;
#[path = "../../crates/agent/src/files/path.rs"]
mod path;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    resolve(input);
    for (name, value) in fields::decoded_fields(input) {
        assert!(name.len() + value.len() <= input.len(), "nothing grows when it is decoded");
        resolve(&value);
    }
});

fn resolve(given: &[u8]) {
    let Ok(plain) = path::resolve(given) else { return };
    assert_eq!(plain.first(), Some(&b'/'));
    assert!(plain.len() < 4096 && !plain.contains(&0));
    let parts = plain[1..].split(|&byte| byte == b'/');
    let is_plain = |part: &[u8]| !matches!(part, b"" | b"." | b"..") && part.len() <= 255;
    assert!(plain == b"/" || { parts }.all(is_plain), "{plain:?}");
    assert_eq!(path::resolve(&plain).as_ref(), Ok(&plain), "what is plain stays as it is");
    match path::split(&plain) {
        Some((directory, name)) => assert_eq!(path::join(directory, name), plain),
        None => assert_eq!(plain, b"/"),
    }
}
