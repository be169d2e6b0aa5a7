//! By which the things that a request makes are known when the same request comes again.

use std::{fmt::Debug, str::FromStr};

use uuid::Uuid;

/// Of one request with an `Idempotency-Key`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    id: Uuid,
    /// A server or a task ended before it had answered: what it made may be there already.
    pub(crate) again: bool,
}

impl Ticket {
    pub(crate) fn new(id: Uuid, again: bool) -> Self {
        Self { id, again }
    }

    /// Of the request's own row.
    pub(crate) fn row(&self) -> Uuid {
        self.id
    }

    /// The id of the request's so-manieth thing: the same whenever it is asked for.
    pub(crate) fn id<T: FromStr<Err: Debug>>(&self, place: usize) -> T {
        let id = Uuid::new_v5(&self.id, &(place as u64).to_be_bytes());
        id.to_string().parse().expect("every id can be a UUID")
    }
}

#[cfg(test)]
mod tests {
    use api::{KeyId, SandboxId};

    use super::*;

    #[test]
    fn each_thing_of_a_request_has_one_id() {
        let (ticket, other) =
            (Ticket::new(Uuid::new_v4(), false), Ticket::new(Uuid::new_v4(), false));
        assert_eq!(ticket.id::<SandboxId>(3), Ticket { again: true, ..ticket }.id(3));
        assert_ne!(ticket.id::<SandboxId>(0), ticket.id(1));
        assert_ne!(ticket.id::<SandboxId>(0), other.id(0));
        assert_eq!(ticket.id::<KeyId>(0).to_string(), ticket.id::<SandboxId>(0).to_string());
    }
}
