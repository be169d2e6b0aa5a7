//! The guest's first process.

fn main() {
    if std::env::args().nth(1).as_deref() == Some("kernel") {
        std::process::exit(agent::kernel::run());
    }
    if std::env::args().nth(1).as_deref() == Some("transfer") {
        std::process::exit(agent::transfer::run());
    }
    if std::process::id() != 1 {
        agent::boot::report(
            "run",
            Err::<(), _>(anyhow::anyhow!("it is the first process of a guest and nothing else")),
        );
        return;
    }
    // The kernel panics when PID 1 exits, so every road from here ends in a power-off.
    match std::panic::catch_unwind(run) {
        Ok(ended) => agent::boot::report("run", ended),
        // The message is on the console already.
        Err(_) => agent::boot::report("run", Err::<(), _>(anyhow::anyhow!("it panicked"))),
    }
    agent::boot::power_off();
}

fn run() -> anyhow::Result<()> {
    let port = agent::boot::boot()?;
    agent::serve(port, agent::Options::guest())
}
