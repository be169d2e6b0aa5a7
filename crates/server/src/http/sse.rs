//! Server-sent events as the published clients read them: `event:` before `data:`, data in ASCII.

use std::{convert::Infallible, fmt::Write, time::Duration};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{
    HeaderValue,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};
use serde::Serialize;

use super::stopping::Lasting;

/// After so long without an event comes a comment, so that neither client nor proxy takes the silence for an end.
const QUIET: Duration = Duration::from_secs(10);
const PING: &[u8] = b": ping\n\n";

/// Of a server that is asked to stop. A command that is being watched goes on.
const STOPPED: &str = "the server is being stopped; what goes on in the sandbox goes on without it";

/// One event with JSON data.
pub(super) fn event(name: &str, data: &impl Serialize) -> Bytes {
    let json = serde_json::to_string(data).unwrap_or_else(|_| "null".to_owned());
    Bytes::from(format!("event: {name}\ndata: {}\n\n", ascii(&json)))
}

/// One event whose data is a line of text as it is, for a client that prints it unparsed.
pub(super) fn line(text: &str) -> Bytes {
    // Everything that Python's `splitlines` takes for the end of a line.
    let text = text.replace(
        [
            '\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}',
            '\u{2029}',
        ],
        " ",
    );
    Bytes::from(format!("data: {text}\n\n"))
}

/// JSON with every character beyond ASCII as `\uXXXX`: one client decodes Latin-1 and splits at U+0085 and U+2028.
fn ascii(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii() {
            escaped.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                // Writing into a string cannot fail.
                let _ = write!(escaped, "\\u{unit:04x}");
            }
        }
    }
    escaped
}

/// Streams events, with pings while there are none.
pub(super) fn response(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let events = Box::pin(events);
    let with_pings = futures::stream::unfold(events, |mut events| async move {
        match tokio::time::timeout(QUIET, events.next()).await {
            Ok(Some(event)) => Some((Ok::<_, Infallible>(event), events)),
            Ok(None) => None,
            Err(_) => Some((Ok(Bytes::from_static(PING)), events)),
        }
    });
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    let no_buffering = [("x-accel-buffering", HeaderValue::from_static("no"))];
    let last = event("error", &serde_json::json!({ "error": STOPPED }));
    let lasting = axum::Extension(Lasting::Say(last));
    (headers, no_buffering, lasting, Body::from_stream(with_pings)).into_response()
}

/// Cuts a stream of bytes into texts, never inside a character. What is not UTF-8 becomes U+FFFD.
#[derive(Debug, Default)]
pub(super) struct Characters {
    /// The beginning of a character: at most three bytes.
    partial: Vec<u8>,
}

impl Characters {
    pub(super) fn push(&mut self, bytes: &[u8]) -> String {
        let mut all = std::mem::take(&mut self.partial);
        all.extend_from_slice(bytes);
        let end = all.len() - unfinished(&all);
        self.partial = all.split_off(end);
        String::from_utf8_lossy(&all).into_owned()
    }

    /// What never became a character.
    pub(super) fn finish(self) -> String {
        String::from_utf8_lossy(&self.partial).into_owned()
    }
}

/// How many bytes at the end are a character that may still be completed.
fn unfinished(bytes: &[u8]) -> usize {
    (1..=bytes.len().min(3))
        .find(|&length| {
            let tail = &bytes[bytes.len() - length..];
            // An error without a length: more bytes could make it whole.
            tail[0] >= 0xc0
                && std::str::from_utf8(tail)
                    .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(bytes: &[u8], cuts: &[usize]) -> String {
        let mut characters = Characters::default();
        let mut cuts: Vec<usize> = cuts
            .iter()
            .copied()
            .filter(|cut| *cut <= bytes.len())
            .chain([0, bytes.len()])
            .collect();
        cuts.sort_unstable();
        let pieces: Vec<String> =
            cuts.windows(2).map(|pair| characters.push(&bytes[pair[0]..pair[1]])).collect();
        pieces.concat() + &characters.finish()
    }

    proptest! {
        #[test]
        fn a_text_is_whole_however_it_was_cut(text in "[aé日😀]{0,20}", cuts in prop::collection::vec(0usize..80, 0..20)) {
            prop_assert_eq!(cut(text.as_bytes(), &cuts), text);
        }

        #[test]
        fn other_bytes_come_out_as_if_they_had_come_at_once(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x80u8..=0xff], 0..40),
            cuts in prop::collection::vec(0usize..40, 0..20),
        ) {
            prop_assert_eq!(cut(&bytes, &cuts), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn escaped_json_means_the_same_in_ascii(text in any::<String>()) {
            let json = ascii(&serde_json::to_string(&text).unwrap());
            prop_assert!(json.is_ascii() && !json.contains('\n'));
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }

        #[test]
        fn a_line_is_one_line_in_python_too(text in any::<String>()) {
            let frame = line(&text);
            let frame = std::str::from_utf8(&frame).unwrap();
            prop_assert!(frame.starts_with("data: ") && frame.ends_with("\n\n") && frame.matches('\n').count() == 2);
            let is_split = frame.contains(['\r', '\u{85}', '\u{2028}']);
            prop_assert!(!is_split);
        }
    }

    #[test]
    fn an_event_is_named_before_its_data() {
        assert_eq!(
            event("stdout", &serde_json::json!({"chunk": "é\n"})),
            "event: stdout\ndata: {\"chunk\":\"\\u00e9\\n\"}\n\n"
        );
    }

    #[test]
    fn an_emoji_waits_for_its_last_byte() {
        let mut characters = Characters::default();
        let emoji = "😀".as_bytes();
        assert_eq!(characters.push(&emoji[..3]), "");
        assert_eq!(characters.push(&emoji[3..]), "😀");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_filled_with_comments() {
        let events = futures::stream::once(async {
            tokio::time::sleep(Duration::from_secs(25)).await;
            line("late")
        });
        let body = axum::body::to_bytes(response(events).into_body(), usize::MAX).await.unwrap();
        assert_eq!(body, ": ping\n\n: ping\n\ndata: late\n\n");
    }
}
