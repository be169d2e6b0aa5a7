//! Messages of Jupyter's protocol (version 5.3), without signatures: only root can reach the kernel's sockets.

use anyhow::Context;
use serde_json::{Value, json};

use super::zmtp::{Connection, Message};

const DELIMITER: &[u8] = b"<IDS|MSG>";
/// MIME types whose data is JSON rather than text.
const JSON: &str = "json";

/// What a kernel says. Everything else is none of our business.
#[derive(Debug, PartialEq)]
pub(super) enum Said {
    Stream {
        is_error: bool,
        text: String,
    },
    Result(Vec<(String, String)>),
    Error {
        name: String,
        value: String,
        traceback: String,
    },
    Idle,
    /// An answer to a request.
    Answer {
        is_ok: bool,
        /// The cell has asked its kernel to end, which it does in a moment.
        leaves: bool,
    },
    /// One that was too long to be taken.
    TooLong,
    Other,
}

pub(super) struct Request {
    pub(super) id: String,
    pub(super) kind: &'static str,
    pub(super) content: Value,
}

impl Request {
    pub(super) fn send(&self, connection: &mut Connection) -> anyhow::Result<()> {
        let header = json!({
            "msg_id": self.id, "msg_type": self.kind, "session": "atoll", "username": "atoll",
            "version": "5.3", "date": "",
        });
        let (header, content) = (header.to_string(), self.content.to_string());
        connection.send(&[DELIMITER, b"", header.as_bytes(), b"{}", b"{}", content.as_bytes()])
    }
}

pub(super) fn execute(code: &str, is_silent: bool) -> Value {
    json!({
        "code": code, "silent": is_silent, "store_history": !is_silent, "user_expressions": {},
        "allow_stdin": false, "stop_on_error": false,
    })
}

/// The request that it belongs to, and what it says.
pub(super) fn understand(message: Message) -> anyhow::Result<(String, Said)> {
    let Some(parts) = message else { return Ok((String::new(), Said::TooLong)) };
    let start =
        parts.iter().position(|part| part == DELIMITER).context("find the message's parts")?;
    let part = |at: usize| -> anyhow::Result<Value> {
        let bytes = parts.get(start + at).context("find a part of the message")?;
        serde_json::from_slice(bytes).context("read a part of the message")
    };
    let (header, parent) = (part(2)?, part(3)?);
    let kind = header["msg_type"].as_str().unwrap_or_default();
    let said = match kind {
        "stream"
        | "execute_result"
        | "display_data"
        | "update_display_data"
        | "error"
        | "status" => of_content(kind, &part(5)?),
        kind if kind.ends_with("_reply") => {
            let content = part(5)?;
            let mut payload = content["payload"].as_array().into_iter().flatten();
            let leaves =
                payload.any(|one| one["source"] == "ask_exit" && one["keepkernel"] != true);
            Said::Answer { is_ok: content["status"] == "ok", leaves }
        }
        _ => Said::Other,
    };
    Ok((parent["msg_id"].as_str().unwrap_or_default().to_owned(), said))
}

fn of_content(kind: &str, content: &Value) -> Said {
    let text = |name: &str| content[name].as_str().unwrap_or_default().to_owned();
    match kind {
        "stream" => Said::Stream { is_error: content["name"] == "stderr", text: text("text") },
        "error" => {
            let lines = content["traceback"].as_array().into_iter().flatten();
            let lines: Vec<&str> = lines.filter_map(Value::as_str).collect();
            Said::Error {
                name: text("ename"),
                value: text("evalue"),
                traceback: without_colours(&lines.join("\n")),
            }
        }
        "status" if content["execution_state"] == "idle" => Said::Idle,
        "status" => Said::Other,
        _ => Said::Result(forms(&content["data"], kind == "execute_result")),
    }
}

/// A picture's text only says that it is one; of a value it is always wanted.
fn forms(data: &Value, is_value: bool) -> Vec<(String, String)> {
    let all = data.as_object().into_iter().flatten();
    let is_picture = |kind: &str| kind.starts_with("image/");
    let has_picture = data.as_object().is_some_and(|data| data.keys().any(|kind| is_picture(kind)));
    let mut forms: Vec<_> = all
        .filter(|(kind, _)| is_value || !has_picture || *kind != "text/plain")
        .map(|(kind, value)| (kind.clone(), form(kind, value)))
        .collect();
    // The text last: whoever takes the first form that it can show takes a richer one.
    forms.sort_by_key(|(kind, _)| kind == "text/plain");
    forms
}

fn form(kind: &str, value: &Value) -> String {
    match value.as_str() {
        Some(text) if kind.starts_with("image/") && kind != "image/svg+xml" => {
            text.chars().filter(|character| !character.is_ascii_whitespace()).collect()
        }
        Some(text) if !kind.ends_with(JSON) => text.to_owned(),
        Some(_) | None => value.to_string(),
    }
}

/// Kernels colour their tracebacks by escape sequences.
fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("\u{1b}[") {
        plain.push_str(&rest[..at]);
        let sequence = &rest[at + 2..];
        let end = sequence.find(|character: char| ('@'..='~').contains(&character));
        rest = end.map_or("", |end| &sequence[end + 1..]);
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: &str, content: &Value) -> Message {
        let header = json!({ "msg_type": kind }).to_string();
        let parts = ["topic", "<IDS|MSG>", "", &header, r#"{"msg_id": "1"}"#, "{}"];
        let parts = parts.into_iter().map(|part| part.as_bytes().to_vec());
        Some(parts.chain([content.to_string().into_bytes()]).collect())
    }

    fn said(kind: &str, content: &Value) -> Said {
        let (parent, said) = understand(message(kind, content)).unwrap();
        assert_eq!(parent, "1");
        said
    }

    #[test]
    fn a_value_has_its_text_last_and_a_picture_has_none() {
        let data =
            json!({ "data": { "text/plain": "x", "text/html": "<b>", "image/png": "QQ\n=" } });
        let forms = |said| {
            let Said::Result(forms) = said else { panic!("a result") };
            forms.into_iter().map(|(kind, _)| kind).collect::<Vec<_>>()
        };
        assert_eq!(forms(said("execute_result", &data)), ["image/png", "text/html", "text/plain"]);
        assert_eq!(forms(said("display_data", &data)), ["image/png", "text/html"]);
        let table = json!({ "data": { "text/plain": "x", "text/html": "<b>" } });
        assert_eq!(forms(said("display_data", &table)), ["text/html", "text/plain"]);
    }

    #[test]
    fn pictures_are_bare_base64_and_json_is_its_text() {
        let data =
            json!({ "data": { "image/png": "QUJD\nRA==\n", "application/json": {"a": [1]} } });
        let expected = [("application/json", "{\"a\":[1]}"), ("image/png", "QUJDRA==")];
        let expected = expected.map(|(kind, data)| (kind.to_owned(), data.to_owned())).to_vec();
        assert_eq!(said("execute_result", &data), Said::Result(expected));
    }

    #[test]
    fn a_traceback_has_no_colours() {
        let content = json!({ "ename": "E", "evalue": "v", "traceback": ["\u{1b}[0;31mE\u{1b}[0m", "line 1"] });
        let Said::Error { traceback, .. } = said("error", &content) else { panic!("an error") };
        assert_eq!(traceback, "E\nline 1");
    }

    #[test]
    fn what_no_client_needs_is_passed_over() {
        assert_eq!(said("execute_input", &json!({})), Said::Other);
        assert_eq!(said("status", &json!({ "execution_state": "busy" })), Said::Other);
        assert_eq!(said("status", &json!({ "execution_state": "idle" })), Said::Idle);
        assert_eq!(
            said("execute_reply", &json!({ "status": "error" })),
            Said::Answer { is_ok: false, leaves: false }
        );
        let exit =
            json!({ "status": "ok", "payload": [{ "source": "ask_exit", "keepkernel": false }] });
        assert_eq!(said("execute_reply", &exit), Said::Answer { is_ok: true, leaves: true });
        assert_eq!(understand(None).unwrap().1, Said::TooLong);
    }
}
