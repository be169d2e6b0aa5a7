//! As much of a DNS message as a forwarder has to know. Pure; both sides are hostile.

/// Identity, flags and four counts.
const HEADER: usize = 12;
/// A question's type and class, after its name.
const TYPE_AND_CLASS: usize = 4;

/// Types that ask for a whole zone.
const IXFR: u16 = 251;
const AXFR: u16 = 252;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    FormatError = 1,
    ServerFailure = 2,
    NotImplemented = 4,
    Refused = 5,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Forward,
    Refuse(Code),
    /// Too short to be answered, or itself an answer: answering those makes loops.
    Ignore,
}

/// Only plain questions go on. Resolvers may trust the host's address with updates and zone transfers;
/// a guest must not borrow that trust.
pub(super) fn judge(query: &[u8]) -> Verdict {
    if query.len() < HEADER || query[2] & 0x80 != 0 {
        return Verdict::Ignore;
    }
    if query[2] & 0x78 != 0 {
        return Verdict::Refuse(Code::NotImplemented);
    }
    let Some(question) = question(query) else {
        return Verdict::Refuse(Code::FormatError);
    };
    let kind = &question[question.len() - TYPE_AND_CLASS..];
    match u16::from_be_bytes([kind[0], kind[1]]) {
        IXFR | AXFR => Verdict::Refuse(Code::Refused),
        _ => Verdict::Forward,
    }
}

/// The one question of a query; `None` unless there is exactly one, whole and not compressed.
fn question(query: &[u8]) -> Option<&[u8]> {
    if query.get(4..6)? != [0, 1] {
        return None;
    }
    let mut at = HEADER;
    loop {
        match query.get(at)? {
            0 => break,
            length @ 1..=63 => at += 1 + usize::from(*length),
            64.. => return None,
        }
    }
    query.get(HEADER..at + 1 + TYPE_AND_CLASS)
}

/// Whether `answer` is one to `query`.
pub(super) fn answers(query: &[u8], answer: &[u8]) -> bool {
    answer.len() >= HEADER && answer[..2] == query[..2] && answer[2] & 0x80 != 0
}

/// Whether another resolver could hardly say more: "no such name" is an answer, "I cannot" is not.
pub(super) fn is_useful(answer: &[u8]) -> bool {
    let code = answer[3] & 0x0f;
    [Code::ServerFailure, Code::NotImplemented, Code::Refused]
        .iter()
        .all(|other| *other as u8 != code)
}

/// An answer without records. `query` has been judged: it has a header.
pub(super) fn refusal(query: &[u8], code: Code) -> Vec<u8> {
    reply(query, 0, code as u8)
}

/// Tells the guest to ask again by TCP.
pub(super) fn truncation(query: &[u8]) -> Vec<u8> {
    const TRUNCATED: u8 = 0x02;
    reply(query, TRUNCATED, 0)
}

/// Never longer than the query.
fn reply(query: &[u8], flags: u8, code: u8) -> Vec<u8> {
    const ANSWER: u8 = 0x80;
    const RECURSION_AVAILABLE: u8 = 0x80;
    let question = question(query).unwrap_or_default();
    let mut reply = query[..HEADER].to_vec();
    // Kind of query and "recursion desired" are repeated.
    reply[2] = ANSWER | query[2] & 0x79 | flags;
    reply[3] = RECURSION_AVAILABLE | code;
    reply[4..].fill(0);
    reply[5] = u8::from(!question.is_empty());
    reply.extend(question);
    reply
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn query(flags: u8, kind: u16) -> Vec<u8> {
        let mut query = vec![7, 7, flags, 0, 0, 1, 0, 0, 0, 0, 0, 1];
        query.extend(b"\x07example\x00");
        query.extend(kind.to_be_bytes());
        query.extend(b"\x00\x01 and an additional record");
        query
    }

    #[test]
    fn only_plain_questions_go_on() {
        assert_eq!(judge(&query(1, 1)), Verdict::Forward);
        assert_eq!(judge(&query(1, AXFR)), Verdict::Refuse(Code::Refused));
        assert_eq!(judge(&query(5 << 3, 1)), Verdict::Refuse(Code::NotImplemented));
        assert_eq!(judge(&query(0x81, 1)), Verdict::Ignore);
        assert_eq!(judge(&query(1, 1)[..20]), Verdict::Refuse(Code::FormatError));
    }

    proptest! {
        #[test]
        fn no_message_is_answered_with_more_than_it_brought(message in proptest::collection::vec(any::<u8>(), 0..600)) {
            match judge(&message) {
                Verdict::Ignore => {}
                Verdict::Refuse(code) => {
                    let reply = refusal(&message, code);
                    prop_assert!(reply.len() <= message.len());
                    prop_assert!(answers(&message, &reply));
                }
                Verdict::Forward => {
                    prop_assert!(truncation(&message).len() <= message.len());
                    prop_assert!(answers(&message, &refusal(&message, Code::ServerFailure)));
                }
            }
        }

        #[test]
        fn a_reply_is_never_taken_for_a_query(kind: u16, flags in 0..0x80_u8) {
            let query = query(flags, kind);
            prop_assert_eq!(judge(&refusal(&query, Code::ServerFailure)), Verdict::Ignore);
        }
    }
}
