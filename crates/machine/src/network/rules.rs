//! The text of all nftables rules. Pure: nothing is run here.
//!
//! Two places decide about a guest's packet. Its namespace lets out only what bears the guest's address,
//! and itself answers only DNS and ping. The host's table, one for all sandboxes of an instance, refuses
//! every destination that is not the internet's.

use std::fmt::Write;

use super::{
    address::{GATEWAY, GUEST, INSTANCE_PREFIX, Instance, TAP, UPLINK},
    egress::Egress,
};

/// Where no sandbox may send anything unless `--egress-allow` names it. The documentation ranges
/// (192.0.2.0/24, 198.51.100.0/24, 203.0.113.0/24) are left out on purpose: test networks use them.
const DENIED: [&str; 12] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    // Shared by carriers; ours, too: all sandboxes are in it, and so is a metadata service (100.100.100.200).
    "100.64.0.0/10",
    "127.0.0.0/8",
    // A cloud's agent endpoint, at a public address but inside the host's network.
    "168.63.129.16/32",
    // Link-local, and most clouds' metadata.
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
];

/// The host's table. It replaces an older one of the same name in one transaction, so running sandboxes
/// are never without it.
///
/// A drop here is final, whatever the host's own firewall says; an accept is not, so a host that drops
/// forwarded packets still does.
pub(super) fn host_table(instance: Instance, allow: &[Egress]) -> String {
    let table = instance.table();
    let link = instance.link_prefix();
    let range = format!("{}/{INSTANCE_PREFIX}", instance.range());
    let denied = DENIED.join(", ");
    let mut allowed = String::new();
    for egress in allow {
        let network = egress.network();
        let _ = match egress.port() {
            Some(port) => {
                writeln!(
                    allowed,
                    "    ip daddr {network} meta l4proto {{ tcp, udp }} th dport {port} accept"
                )
            }
            None => writeln!(allowed, "    ip daddr {network} accept"),
        };
    }
    format!(
        r#"{removal}table inet {table} {{
  chain allowed {{
{allowed}  }}
  chain input {{
    type filter hook input priority -10; policy accept;
    iifname != "{link}*" accept
    meta nfproto != ipv4 drop
    ip saddr != {range} drop
    ct state established,related accept
    jump allowed
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
    oifname "{link}*" drop
    jump allowed
    ip daddr {{ {denied} }} drop
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
    let table = instance.table();
    format!("table inet {table}\ndelete table inet {table}\n")
}

/// The same in every namespace.
pub(super) fn namespace_table() -> String {
    format!(
        r#"table inet atoll {{
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname "lo" accept
    iifname "{TAP}" ip saddr {GUEST} ip daddr {GATEWAY} udp dport 53 accept
    iifname "{TAP}" ip saddr {GUEST} ip daddr {GATEWAY} tcp dport 53 accept
    iifname "{TAP}" ip saddr {GUEST} ip daddr {GATEWAY} icmp type echo-request accept
  }}
  chain output {{
    type filter hook output priority filter; policy accept;
    meta nfproto ipv6 drop
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    iifname "{TAP}" oifname "{UPLINK}" ip saddr {GUEST} accept
    iifname "{UPLINK}" oifname "{TAP}" ct state established,related accept
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{UPLINK}" ip saddr {GUEST} masquerade
  }}
}}
"#
    )
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

    #[test]
    fn what_is_allowed_is_asked_before_what_is_denied() {
        let text = host_table(Instance::new(3).unwrap(), &["10.9.0.0/16:443".parse().unwrap()]);
        let outgoing = &text[text.find("chain outgoing").unwrap()..];
        assert!(outgoing.find("jump allowed").unwrap() < outgoing.find("10.0.0.0/8").unwrap());
        assert!(
            text.contains("ip daddr 10.9.0.0/16 meta l4proto { tcp, udp } th dport 443 accept")
        );
    }
}
