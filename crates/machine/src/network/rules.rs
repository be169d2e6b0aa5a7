//! The text of all nftables rules. Pure: nothing is run here.
//!
//! A guest's packet is judged three times. The tap lets in nothing but IPv4 from the guest's address, and
//! questions for the gateway's hardware address. The namespace knows the sandbox's policy, and itself answers
//! only DNS and ping. The host's table, one for all sandboxes of an instance, refuses whatever is not the
//! internet's; closed ranges are named in both places, so that neither has to trust the other.

use std::{fmt::Write, ops::RangeInclusive};

use super::{
    address::{GATEWAY, GUEST, GUEST_MAC, INSTANCE_PREFIX, Instance, TAP, UPLINK},
    destination::Destination,
    policy::{CLOSED, Door, Egress, HostPolicy, Policy},
};

/// Of one guest. The host's table of connections is everybody's.
const CONNECTIONS: u32 = 2048;
/// Of one guest, in a second, and at once.
const QUERIES: (u32, u32) = (200, 400);
const QUERY_CONNECTIONS: (u32, u32) = (20, 40);
const PINGS: (u32, u32) = (20, 20);
/// Of a rate limit. A frame that is yet to be cut for the wire has up to 64 KiB.
const LEAST_BURST_BYTES: u64 = 256 * 1024;
const BYTES_OF_A_MBIT: u64 = 1_000_000 / 8;

/// Before a drop: a guest that may not connect learns it at once, and one that might no longer loses its connections.
const RESET: &str = "meta l4proto tcp reject with tcp reset";

/// The host's table. It replaces an older one of the same name in one transaction, so running sandboxes
/// are never without it.
///
/// A drop here is final, whatever the host's own firewall says; an accept is not, so a host that drops
/// forwarded packets still does.
pub(super) fn host_table(instance: Instance, host: &HostPolicy) -> String {
    let table = instance.table();
    let link = instance.link_prefix();
    let range = format!("{}/{INSTANCE_PREFIX}", instance.range());
    let door = host.door.as_ref().map_or_else(String::new, |Door { ports, .. }| {
        format!("    {} accept\n", door(Packets::Sent, instance, ports))
    });
    let closed = CLOSED.join(", ");
    let mut opened = String::new();
    for destination in &host.deny {
        let _ = writeln!(opened, "    {} drop", Packets::Sent.of(destination));
    }
    for destination in host.opened() {
        pass(&mut opened, Packets::Sent, destination, "accept");
    }
    format!(
        r#"{removal}table inet {table} {{
  chain opened {{
{opened}  }}
  chain input {{
    type filter hook input priority -10; policy accept;
    iifname != "{link}*" accept
    meta nfproto != ipv4 drop
    ip saddr != {range} drop
    ct state established,related accept
    ct state invalid drop
{door}    jump opened
    {RESET}
    drop
  }}
  chain forward {{
    type filter hook forward priority -10; policy accept;
    iifname "{link}*" jump outgoing
    oifname "{link}*" jump incoming
  }}
  chain outgoing {{
    meta nfproto != ipv4 drop
    ip saddr != {range} drop
    ct state invalid drop
    oifname "{link}*" drop
    jump opened
    ip daddr {{ {closed} }} {RESET}
    ip daddr {{ {closed} }} drop
    accept
  }}
  chain incoming {{
    ct state established,related accept
    drop
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {range} oifname != "{link}*" masquerade
  }}
}}
"#,
        removal = host_table_removal(instance),
    )
}

/// Succeeds without a table, too.
pub(super) fn host_table_removal(instance: Instance) -> String {
    removal(&format!("inet {}", instance.table()))
}

fn removal(table: &str) -> String {
    format!("table {table}\ndelete table {table}\n")
}

/// Everything in a namespace, instead of what was there, in one transaction.
pub(super) fn namespace_tables(instance: Instance, host: &HostPolicy, policy: &Policy) -> String {
    let (queries, query_burst) = QUERIES;
    let (connections, connection_burst) = QUERY_CONNECTIONS;
    let (pings, ping_burst) = PINGS;
    let (tap_removal, removal) = (removal("netdev atoll"), removal("inet atoll"));
    let judges = judges(instance, host, policy);
    format!(
        r#"{tap_removal}{removal}table netdev atoll {{
  chain ingress {{
    type filter hook ingress device "{TAP}" priority -500; policy drop;
    ether saddr != {GUEST_MAC} drop
    ip saddr {GUEST} accept
    arp operation request arp saddr ip {GUEST} arp daddr ip {GATEWAY} accept
  }}
}}
{judges}table inet atoll {{
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname != "{TAP}" drop
    meta nfproto != ipv4 drop
    ip saddr != {GUEST} drop
    ip daddr != {GATEWAY} drop
    udp dport 53 limit rate {queries}/second burst {query_burst} packets accept
    ct state invalid drop
    meta l4proto tcp ct state established ct direction reply accept
    tcp dport 53 ct state established accept
    tcp dport 53 limit rate {connections}/second burst {connection_burst} packets accept
    icmp type echo-request limit rate {pings}/second burst {ping_burst} packets accept
  }}
  chain output {{
    type filter hook output priority filter; policy drop;
    meta nfproto ipv4 oifname "{TAP}" ip daddr {GUEST} accept
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    iifname "{TAP}" oifname "{UPLINK}" ip saddr {GUEST} jump outgoing
    iifname "{UPLINK}" oifname "{TAP}" ct state established,related jump incoming
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{UPLINK}" ip saddr {GUEST} masquerade
  }}
}}
"#
    )
}

/// Another policy for a namespace that has its tables, in one transaction. Every packet is judged, those of
/// connections that were open before, too.
pub(super) fn policy_change(instance: Instance, host: &HostPolicy, policy: &Policy) -> String {
    let mut text = String::new();
    for chain in JUDGES {
        let _ = writeln!(text, "flush chain inet atoll {chain}");
    }
    text + &judges(instance, host, policy)
}

/// What leads to the instance's own address, or comes from there.
fn door(packets: Packets, instance: Instance, ports: &RangeInclusive<u16>) -> String {
    let (address, first, last) = (instance.door(), ports.start(), ports.end());
    match packets {
        Packets::Sent => format!("ip daddr {address} tcp dport {first}-{last}"),
        Packets::Received => format!("ip saddr {address} tcp sport {first}-{last}"),
    }
}

const JUDGES: [&str; 7] =
    ["outgoing", "outgoing_opened", "incoming", "incoming_opened", "sent", "received", "refused"];

/// Which packets a judge looks at.
#[derive(Debug, Clone, Copy)]
enum Packets {
    /// By the guest: judged by where they go.
    Sent,
    /// For the guest: judged by where the connection they belong to went.
    Received,
}

impl Packets {
    /// What leads to `destination`, or comes from there.
    fn of(self, destination: &Destination) -> String {
        let (address, network) = (self.address(), destination.network());
        let port = match self {
            Self::Sent => "dport",
            Self::Received => "sport",
        };
        match destination.port() {
            None => format!("{address} {network}"),
            Some(number) => {
                format!("{address} {network} meta l4proto {{ tcp, udp }} th {port} {number}")
            }
        }
    }

    /// The chain that passes them, and the verdict for those that do not.
    fn ends(self) -> (&'static str, &'static str) {
        match self {
            Self::Sent => ("goto sent", "goto refused"),
            Self::Received => ("goto received", "drop"),
        }
    }

    fn address(self) -> &'static str {
        match self {
            Self::Sent => "ip daddr",
            Self::Received => "ct original ip daddr",
        }
    }
}

fn refuse(text: &mut String, packets: Packets, destination: &Destination) {
    let _ = writeln!(text, "    {} {}", packets.of(destination), packets.ends().1);
}

fn pass(text: &mut String, packets: Packets, destination: &Destination, verdict: &str) {
    let _ = writeln!(text, "    {} {verdict}", packets.of(destination));
    if destination.port().is_some() && matches!(packets, Packets::Received) {
        // What routers have to say of such a connection has no port.
        let (address, network) = (packets.address(), destination.network());
        let _ =
            writeln!(text, "    {address} {network} ct state related meta l4proto icmp {verdict}");
    }
}

/// The chains that a policy changes.
fn judges(instance: Instance, host: &HostPolicy, policy: &Policy) -> String {
    let limit = rate_limit(policy);
    let mut text = format!(
        r#"table inet atoll {{
  chain sent {{
{limit}    ct state new ct count over {CONNECTIONS} drop
    accept
  }}
  chain received {{
{limit}    accept
  }}
  chain refused {{
    {RESET}
    drop
  }}
"#
    );
    judge(&mut text, instance, host, policy, Packets::Sent, "outgoing");
    judge(&mut text, instance, host, policy, Packets::Received, "incoming");
    text + "}\n"
}

fn rate_limit(policy: &Policy) -> String {
    policy.rate_limit_mbit.map_or_else(String::new, |mbit| {
        let rate = u64::from(mbit) * BYTES_OF_A_MBIT;
        let burst = (rate / 10).max(LEAST_BURST_BYTES);
        format!("    limit rate over {rate} bytes/second burst {burst} bytes drop\n")
    })
}

fn judge(
    text: &mut String,
    instance: Instance,
    host: &HostPolicy,
    policy: &Policy,
    packets: Packets,
    chain: &str,
) {
    let (passed, refused) = packets.ends();
    let _ = writeln!(text, "  chain {chain}_opened {{");
    for destination in &policy.allow {
        pass(text, packets, destination, passed);
    }
    if policy.egress == Egress::Internet {
        for destination in &host.allow {
            pass(text, packets, destination, passed);
        }
    }
    let _ = write!(
        text,
        "    {refused}\n  }}\n  chain {chain} {{\n    ct state invalid drop\n    meta l4proto != {{ tcp, udp, icmp }} drop\n"
    );
    for destination in host.deny.iter().chain(&policy.deny) {
        refuse(text, packets, destination);
    }
    if let Some(Door { ports, .. }) =
        host.door.as_ref().filter(|_| policy.door || policy.egress == Egress::Internet)
    {
        let _ = writeln!(text, "    {} {passed}", door(packets, instance, ports));
    }
    for destination in host.opened() {
        pass(text, packets, destination, &format!("goto {chain}_opened"));
    }
    let _ = writeln!(text, "    {} {{ {} }} {refused}", packets.address(), CLOSED.join(", "));
    match policy.egress {
        Egress::Internet => {
            let _ = writeln!(text, "    {passed}");
        }
        Egress::None => {
            for destination in &policy.allow {
                pass(text, packets, destination, passed);
            }
            let _ = writeln!(text, "    {refused}");
        }
    }
    text.push_str("  }\n");
}

/// The tables of `nft list chains` that drop every forwarded packet they do not know, as Docker's does:
/// behind one of them sandboxes have no internet.
pub(super) fn tables_that_drop_forwarded(chains: &str) -> Vec<&str> {
    let mut table = "";
    let mut found = Vec::new();
    for line in chains.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("table ") {
            table = name.trim_end_matches('{').trim();
        } else if line.contains("hook forward") && line.contains("policy drop") {
            found.push(table);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_drops_forwarded_packets_is_recognised() {
        let chains = "table inet mine {\n\tchain forward {\n\t\ttype filter hook forward priority filter; policy accept;\n\t}\n}\n\
                      table ip filter {\n\tchain INPUT {\n\t\ttype filter hook input priority filter; policy drop;\n\t}\n\
                      \tchain FORWARD {\n\t\ttype filter hook forward priority filter; policy drop;\n\t}\n}\n";
        assert_eq!(tables_that_drop_forwarded(chains), ["ip filter"]);
    }

    fn destinations(texts: &[&str]) -> Vec<Destination> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn a_refusal_of_the_host_is_asked_before_what_it_opens_and_that_before_what_is_closed() {
        let host = HostPolicy {
            deny: destinations(&["10.9.9.0/24"]),
            allow: destinations(&["10.9.0.0/16:443"]),
            permit: destinations(&["10.8.0.0/16"]),
            door: None,
        };
        let text = host_table(Instance::new(3).unwrap(), &host);
        let place = |rule: &str| text.find(rule).unwrap_or_else(|| panic!("{rule} in {text}"));
        let allowed = place("ip daddr 10.9.0.0/16 meta l4proto { tcp, udp } th dport 443 accept");
        assert!(place("ip daddr 10.9.9.0/24 drop") < allowed);
        assert!(allowed < place("ip daddr 10.8.0.0/16 accept"));
        let outgoing = &text[place("chain outgoing")..];
        assert!(outgoing.find("jump opened").unwrap() < outgoing.find("10.0.0.0/8").unwrap());
    }

    #[test]
    fn what_is_permitted_is_reached_only_by_name() {
        let host = HostPolicy { permit: destinations(&["10.8.0.0/16"]), ..HostPolicy::default() };
        let chain = |policy: &Policy| {
            let text = policy_change(Instance::new(3).unwrap(), &host, policy);
            let start = text.find("chain outgoing_opened {").unwrap();
            text[start..start + text[start..].find('}').unwrap()].to_owned()
        };
        assert!(!chain(&Policy::default()).contains("goto sent"));
        let named = Policy { allow: destinations(&["10.8.1.0/24"]), ..Policy::default() };
        assert!(chain(&named).contains("ip daddr 10.8.1.0/24 goto sent"));
    }
}
