//! Server-sent events, as far as the API uses them: `event:` and `data:` lines, comments, frames ended by an empty line.

/// Longer frames are not ours.
const LONGEST_FRAME: usize = 32 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// `message` where the server names none.
    pub name: String,
    pub data: String,
}

/// Turns bytes, cut anywhere, into events.
#[derive(Debug, Default)]
pub struct Parser {
    /// The line that has not ended yet.
    line: Vec<u8>,
    name: Option<String>,
    /// `None` until a `data:` line was seen: a frame without one is no event.
    data: Option<String>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is longer than any that the server sends")]
pub struct TooLong;

impl Parser {
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<Event>, TooLong> {
        let mut events = Vec::new();
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            self.extend_line(&rest[..end])?;
            rest = &rest[end + 1..];
            let line = std::mem::take(&mut self.line);
            events.extend(self.end_line(line.strip_suffix(b"\r").unwrap_or(&line)));
        }
        self.extend_line(rest)?;
        Ok(events)
    }

    fn extend_line(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        let held = self.line.len() + self.data.as_ref().map_or(0, String::len);
        if held + bytes.len() > LONGEST_FRAME {
            return Err(TooLong);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn end_line(&mut self, line: &[u8]) -> Option<Event> {
        if line.is_empty() {
            let name = self.name.take().unwrap_or_else(|| "message".to_owned());
            return self.data.take().map(|data| Event { name, data });
        }
        let line = String::from_utf8_lossy(line);
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => self.name = Some(value.to_owned()),
            "data" => match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            },
            // Comments have no field; `id` and `retry` mean nothing here.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let event = ("[a-z]{1,9}", "[^\r\n]{0,40}(\n[^\r\n]{0,40}){0,3}");
        prop::collection::vec(event.prop_map(|(name, data)| Event { name, data }), 0..8)
    }

    fn written(events: &[Event], line_end: &str) -> String {
        let mut text = String::new();
        for Event { name, data } in events {
            text.push_str(&format!(": ping{line_end}event: {name}{line_end}"));
            data.split('\n').for_each(|line| text.push_str(&format!("data: {line}{line_end}")));
            text.push_str(line_end);
        }
        text
    }

    proptest! {
        #[test]
        fn events_come_back_wherever_the_bytes_are_cut(events in events(), crlf: bool, size in 1usize..30) {
            let text = written(&events, if crlf { "\r\n" } else { "\n" });
            let mut parser = Parser::default();
            let read: Vec<_> = text.as_bytes().chunks(size).flat_map(|piece| parser.push(piece).unwrap()).collect();
            prop_assert_eq!(read, events);
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..8)) {
            let mut parser = Parser::default();
            for piece in pieces {
                prop_assert!(parser.push(&piece).is_ok());
            }
        }
    }

    #[test]
    fn a_frame_without_an_end_is_refused_before_it_fills_the_memory() {
        let mut parser = Parser::default();
        let piece = vec![b'x'; 1 << 20];
        assert!((0..64).any(|_| parser.push(&piece) == Err(TooLong)));
        let mut parser = Parser::default();
        let line = [b"data: ".as_slice(), &piece, b"\n"].concat();
        assert!((0..64).any(|_| parser.push(&line) == Err(TooLong)));
    }

    #[test]
    fn a_frame_without_data_is_no_event() {
        assert_eq!(Parser::default().push(b": ping\n\nevent: x\n\n"), Ok(Vec::new()));
    }
}
