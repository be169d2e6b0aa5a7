//! The guest's first process.

fn main() {
    // The kernel panics when PID 1 exits, so every road from here ends in a power-off.
    agent::boot::report("run", run());
    agent::boot::power_off();
}

fn run() -> anyhow::Result<()> {
    let port = agent::boot::boot()?;
    agent::serve(port, agent::Options::guest())
}
