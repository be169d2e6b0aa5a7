//! What sandboxes may reach: checked, put in place before a guest runs, changed while it runs, and counted.

use std::{
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use api::{AccountId, NetworkPolicy, SandboxId, UpdateNetwork};
use machine::network::{Destination, DestinationError, Egress, Gate, HostPolicy, Policy, Traffic};

use super::{
    Sandboxes,
    driver::Inside,
    managed,
    registry::{Entry, locked},
    state::Wish,
};
use crate::Error;

const MOST_DESTINATIONS: usize = 64;
const HIGHEST_RATE_MBIT: u32 = 100_000;
/// Between two looks at what sandboxes have sent.
const METER_EVERY: Duration = Duration::from_secs(60);

/// `before` with what `update` says; `field` is where the update stands in its request, with a dot behind it.
///
/// # Errors
/// 400 names the bad field.
pub(crate) fn updated(
    before: NetworkPolicy,
    update: UpdateNetwork,
    host: &HostPolicy,
    field: &str,
) -> Result<NetworkPolicy, Error> {
    let list = |name: &str,
                texts: Option<Vec<String>>,
                before,
                mine: &dyn Fn(&Destination) -> Result<(), String>| match texts {
        Some(texts) => destinations(&texts, &format!("{field}{name}"), mine),
        None => Ok(before),
    };
    let may_name = |destination: &Destination| {
        if host.keeps_closed(destination) {
            return Err(format!(
                "{destination} is in a private range, and the operator of this server permits no sandbox to name it"
            ));
        }
        Ok(())
    };
    let rate_limit_mbit = match update.rate_limit_mbit {
        None => before.rate_limit_mbit,
        Some(0) => None,
        Some(mbit) if mbit <= HIGHEST_RATE_MBIT => Some(mbit),
        Some(_) => {
            return Err(Error::invalid(format!(
                "`{field}rate_limit_mbit` must be at most {HIGHEST_RATE_MBIT}; 0 is no limit"
            )));
        }
    };
    Ok(NetworkPolicy {
        egress: update.egress.unwrap_or(before.egress),
        allow: list("allow", update.allow, before.allow, &may_name)?,
        deny: list("deny", update.deny, before.deny, &|_| Ok(()))?,
        rate_limit_mbit,
    })
}

/// In one way of writing.
fn destinations(
    texts: &[String],
    field: &str,
    check: &dyn Fn(&Destination) -> Result<(), String>,
) -> Result<Vec<String>, Error> {
    if texts.len() > MOST_DESTINATIONS {
        return Err(Error::invalid(format!(
            "`{field}` may have at most {MOST_DESTINATIONS} entries"
        )));
    }
    texts
        .iter()
        .enumerate()
        .map(|(index, text)| {
            let named = |reason: String| Error::invalid(format!("`{field}[{index}]`: {reason}"));
            // A refusal repeats the text, which is anyone's.
            if text.len() > 64 {
                return Err(named(
                    "it is too long; write 203.0.113.0/24 or 203.0.113.5:443".into(),
                ));
            }
            let destination: Destination =
                text.parse().map_err(|error: DestinationError| named(error.to_string()))?;
            check(&destination).map_err(named)?;
            Ok(destination.to_string())
        })
        .collect()
}

/// `door`: it has been given databases, which it reaches whatever else it does not.
///
/// # Errors
/// A row was damaged.
fn for_machine(policy: &NetworkPolicy, door: bool) -> Result<Policy, Error> {
    let parsed = |texts: &[String]| {
        texts.iter().map(|text| text.parse()).collect::<Result<Vec<Destination>, _>>()
    };
    Ok(Policy {
        egress: match policy.egress {
            api::Egress::Internet => Egress::Internet,
            api::Egress::None => Egress::None,
        },
        allow: parsed(&policy.allow).map_err(Error::internal)?,
        deny: parsed(&policy.deny).map_err(Error::internal)?,
        rate_limit_mbit: policy.rate_limit_mbit,
        // With the internet every sandbox does.
        door: door && policy.egress == api::Egress::None,
    })
}

/// As its row has it.
///
/// # Errors
/// The row was damaged.
pub(super) fn policy_of(entry: &Entry) -> Result<Policy, Error> {
    let (policy, door) = entry.look(|row| (row.network.clone(), !row.databases.is_empty()));
    for_machine(&policy, door)
}

/// Before the guest of a freshly prepared network runs. Such a network has the default policy already.
pub(super) async fn put_in_place(gate: &Gate, entry: &Entry) -> Result<(), Error> {
    let policy = policy_of(entry)?;
    if policy == Policy::default() {
        return Ok(());
    }
    gate.set_policy(&policy).await.map_err(Error::internal)
}

/// The same, of a network that was shut.
pub(super) async fn open(gate: &Gate, entry: &Entry) -> Result<(), Error> {
    gate.open(&policy_of(entry)?).await.map_err(Error::internal)
}

/// Over the networks that sandboxes of this server no longer have.
#[derive(Debug, Default)]
pub(crate) struct PastTraffic(Mutex<Traffic>);

impl PastTraffic {
    /// Takes the machine out of `entry`; what went over its network stays in the sandbox's count and in all figures.
    pub(crate) fn take_inside(&self, entry: &Entry) -> Option<std::sync::Arc<Inside>> {
        let mut past = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = locked(&entry.inside).take()?;
        let last = traffic_of(&gone.gate);
        *past = sum(*past, last);
        drop(past);
        entry.change(|row| row.past_traffic = sum(row.past_traffic, last));
        Some(gone)
    }
}

fn sum(one: Traffic, other: Traffic) -> Traffic {
    Traffic {
        sent_bytes: one.sent_bytes.saturating_add(other.sent_bytes),
        received_bytes: one.received_bytes.saturating_add(other.received_bytes),
    }
}

/// Nothing, where somebody has taken the interface away.
fn traffic_of(gate: &Gate) -> Traffic {
    gate.traffic().unwrap_or_else(|error| {
        tracing::warn!(%error, "the traffic of a sandbox cannot be told");
        Traffic::default()
    })
}

impl Sandboxes {
    /// # Errors
    /// 404 when it is not theirs or gone.
    pub fn network(&self, account: &AccountId, id: &SandboxId) -> Result<api::Network, Error> {
        let entry = self.registry.find(account, id)?;
        entry.accept(Wish::Change, self.clock.steady_ms())?;
        Ok(shown(&entry))
    }

    /// Answers when every packet is judged by the new policy.
    ///
    /// # Errors
    /// 400 names the bad field; 404 when it is not theirs or gone; 409 for a database's.
    pub async fn update_network(
        &self,
        account: &AccountId,
        id: &SandboxId,
        update: UpdateNetwork,
    ) -> Result<api::Network, Error> {
        let entry = self.registry.find(account, id)?;
        managed::refuse(&entry)?;
        entry.accept(Wish::Change, self.clock.steady_ms())?;
        // A start under way comes to its end first, so that it cannot put the old policy in place afterwards.
        let _no_other_change = entry.network_changes.lock().await;
        entry.accept(Wish::Change, self.clock.steady_ms())?;
        let before = entry.look(|row| row.network.clone());
        let policy = updated(before.clone(), update, self.sites.networks.host_policy(), "")?;
        let rules = for_machine(&policy, entry.look(|row| !row.databases.is_empty()))?;
        // Written first: should this server die before the rules are in place, the next one puts them there.
        self.write_network(&entry, policy).await?;
        let inside = entry.inside();
        if let Some(inside) = inside
            && let Err(error) = inside.gate.set_policy(&rules).await
        {
            self.write_network(&entry, before).await?;
            return Err(Error::internal(error));
        }
        tracing::info!(sandbox = %id, "changed its network policy");
        Ok(shown(&entry))
    }

    async fn write_network(&self, entry: &Entry, policy: NetworkPolicy) -> Result<(), Error> {
        entry.change(|row| row.network = policy);
        self.save_row(entry).await
    }

    /// Counts what sandboxes have sent: of one account, or of all.
    ///
    /// # Errors
    /// It cannot be written down.
    pub(crate) async fn meter_traffic(&self, account: Option<&AccountId>) -> Result<(), Error> {
        for entry in self.registry.all() {
            if account.is_none_or(|account| entry.look(|row| row.account == *account)) {
                let sent = shown(&entry).sent_bytes;
                if sent > entry.metered_bytes.load(Ordering::Relaxed) {
                    self.db.meter_egress(&entry.look(|row| row.id), sent).await?;
                    entry.metered_bytes.fetch_max(sent, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    /// Of one that is about to be forgotten.
    pub(super) async fn meter_last(&self, entry: &Entry) {
        let (id, sent) = entry.look(|row| (row.id, row.past_traffic.sent_bytes));
        if sent > entry.metered_bytes.load(Ordering::Relaxed)
            && let Err(error) = self.db.meter_egress(&id, sent).await
        {
            tracing::warn!(sandbox = %id, cause = error.causes(), "the last bytes that a sandbox sent are not counted");
        }
    }

    /// A server that is killed finds them again, for networks go on with their sandboxes; a host that dies loses at most
    /// those of one interval.
    pub(super) async fn keep_metering(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(METER_EVERY) => {}
                () = self.closed.cancelled() => return,
            }
            if let Err(error) = self.meter_traffic(None).await {
                tracing::warn!(
                    cause = error.causes(),
                    "what sandboxes have sent cannot be counted"
                );
            }
        }
    }

    /// Of all sandboxes since this server started, for the metrics.
    pub fn traffic(&self) -> Traffic {
        // Held throughout, so that a machine that goes meanwhile is counted once.
        let past = self.past_traffic.0.lock().unwrap_or_else(PoisonError::into_inner);
        let present = self.registry.all();
        let present = present.iter().filter_map(|entry| entry.inside());
        present.fold(*past, |total, inside| sum(total, traffic_of(&inside.gate)))
    }
}

fn shown(entry: &Entry) -> api::Network {
    let present = entry.inside().map(|inside| traffic_of(&inside.gate));
    let (policy, past) = entry.look(|row| (row.network.clone(), row.past_traffic));
    let traffic = sum(past, present.unwrap_or_default());
    api::Network { policy, sent_bytes: traffic.sent_bytes, received_bytes: traffic.received_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(allow: &[&str], deny: &[&str]) -> Result<NetworkPolicy, Error> {
        let host = HostPolicy {
            permit: vec!["10.1.0.0/16:443".parse().unwrap()],
            ..HostPolicy::default()
        };
        let list = |texts: &[&str]| Some(texts.iter().map(|text| (*text).to_owned()).collect());
        let update =
            UpdateNetwork { allow: list(allow), deny: list(deny), ..UpdateNetwork::default() };
        updated(NetworkPolicy::default(), update, &host, "network.")
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        for (allow, deny, place) in [
            (&["1.1.1.1", "x"][..], &[][..], "`network.allow[1]`"),
            (&["10.1.0.0/16"][..], &[], "`network.allow[0]`"),
            (&["169.254.169.254:80"][..], &[], "`network.allow[0]`"),
            (&[], &["1.1.1.1", "::/0", "2.2.2.2"][..], "`network.deny[1]`"),
            (&["1.1.1.1"; 65][..], &[], "`network.allow`"),
            (&[], &["1.1.1.1"; 65][..], "`network.deny`"),
        ] {
            let message = update(allow, deny).unwrap_err().message;
            assert!(message.starts_with(place), "{message}");
        }
        let long = "1".repeat(100_000);
        assert!(update(&[&long], &[]).unwrap_err().message.len() < 200);
    }

    #[test]
    fn private_ranges_may_always_be_denied_and_named_only_where_permitted() {
        let policy = update(&["10.1.2.3:443"], &["10.0.0.0/8", "8.8.8.8"]).unwrap();
        assert_eq!(policy.allow, ["10.1.2.3/32:443"]);
        assert_eq!(policy.deny, ["10.0.0.0/8", "8.8.8.8/32"]);
    }

    #[test]
    fn what_an_update_does_not_say_stays() {
        let before = NetworkPolicy {
            egress: api::Egress::None,
            allow: vec!["1.1.1.1/32".to_owned()],
            deny: Vec::new(),
            rate_limit_mbit: Some(5),
        };
        let host = HostPolicy::default();
        let same = updated(before.clone(), UpdateNetwork::default(), &host, "").unwrap();
        assert_eq!(same, before);
        let unlimited = UpdateNetwork { rate_limit_mbit: Some(0), ..UpdateNetwork::default() };
        let unlimited = updated(before.clone(), unlimited, &host, "").unwrap();
        assert_eq!(unlimited, NetworkPolicy { rate_limit_mbit: None, ..before });
        let closed = for_machine(&unlimited, false).unwrap();
        assert_eq!((closed.egress, closed.door), (Egress::None, false));
        assert!(for_machine(&unlimited, true).unwrap().door);
        // The policy of a network that is prepared: nothing has to be put in place for it.
        assert_eq!(for_machine(&NetworkPolicy::default(), true).unwrap(), Policy::default());
    }
}
