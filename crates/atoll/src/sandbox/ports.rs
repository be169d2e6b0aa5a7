//! `atoll sandbox ports`: what listens in a sandbox.

use api::Port;

use crate::output::table;

pub(crate) fn listed(ports: &[Port]) -> String {
    let row = |port: &Port| {
        let state = if port.listening { "listening" } else { "exposed" };
        let process = port.command.as_ref().map_or_else(String::new, |command| {
            let pid = port.pid.map(|pid| format!(" ({pid})")).unwrap_or_default();
            format!("{command}{pid}")
        });
        [port.port.to_string(), state.to_owned(), port.addresses.join(" "), process]
    };
    table([">port", "state", "addresses", "process"], ports.iter().map(row))
}
