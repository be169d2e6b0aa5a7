//! As much of a DNS message (RFC 1035) as a forwarder has to know. Pure; both sides are hostile.

use std::net::Ipv4Addr;

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

/// Whether it asks for a name below `suffix`, which is in lower case, or for that itself.
pub(super) fn is_within(query: &[u8], suffix: &str) -> bool {
    let Some(question) = question(query) else { return false };
    let mut rest = &question[..question.len() - TYPE_AND_CLASS];
    let mut labels = Vec::new();
    while let Some((&length @ 1.., after)) = rest.split_first() {
        let (label, after) = after.split_at(length.into());
        labels.push(label.to_ascii_lowercase());
        rest = after;
    }
    let name = labels.join(&b'.');
    let before = name.strip_suffix(suffix.as_bytes());
    before.is_some_and(|before| before.is_empty() || before.ends_with(b"."))
}

/// The one address of a name. It has no records of other types.
pub(super) fn addressed(query: &[u8], address: Ipv4Addr) -> Vec<u8> {
    /// Type and class.
    const ADDRESS_ON_THE_INTERNET: [u8; TYPE_AND_CLASS] = [0, 1, 0, 1];
    const SECONDS: [u8; 4] = [0, 0, 0, 60];
    /// A pointer to the question's.
    const NAME: [u8; 2] = [0xc0, HEADER as u8];
    let mut answer = reply(query, 0, 0);
    if question(query).is_some_and(|question| question.ends_with(&ADDRESS_ON_THE_INTERNET)) {
        answer[7] = 1;
        answer.extend(NAME.into_iter().chain(ADDRESS_ON_THE_INTERNET).chain(SECONDS).chain([0, 4]));
        answer.extend(address.octets());
    }
    answer
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

    #[test]
    fn a_name_of_our_own_has_one_address_and_nothing_else() {
        for (suffix, is_within_it) in [("example", true), ("ple", false), ("a.example", false)] {
            assert_eq!(is_within(&query(1, 1), suffix), is_within_it, "{suffix}");
        }
        let below =
            b"\x07\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01A\x07eXample\x00\x00\x01\x00\x01";
        assert!(is_within(below, "example") && is_within(below, "a.example"));
        let address = Ipv4Addr::new(100, 64, 8, 0);
        let answer = addressed(below, address);
        assert_eq!(answer[..12], [7, 7, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert!(answer.ends_with(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 100, 64, 8, 0]));
        const AAAA: u16 = 28;
        let other = addressed(&query(1, AAAA), address);
        assert_eq!((other[3], &other[4..12]), (0x80, &[0, 1, 0, 0, 0, 0, 0, 0][..]));
    }

    proptest! {
        #[test]
        fn a_name_is_looked_at_in_any_message(message in proptest::collection::vec(any::<u8>(), 0..600)) {
            if judge(&message) == Verdict::Forward {
                is_within(&message, "example");
                prop_assert!(answers(&message, &addressed(&message, Ipv4Addr::LOCALHOST)));
            }
        }

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
