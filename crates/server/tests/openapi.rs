//! The document that is checked in for readers and client generators says what the routes say.

use std::{fs, path::Path};

/// `cargo xtask openapi` sets `UPDATE_OPENAPI`, which writes the document instead of comparing it.
#[test]
fn openapi_json_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../openapi.json");
    let current = serde_json::to_string_pretty(&server::http::openapi()).unwrap() + "\n";
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        fs::write(&path, &current).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == current,
        "openapi.json is not what the routes say: run `cargo xtask openapi`"
    );
}
