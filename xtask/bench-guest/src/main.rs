//! PID 1 of the bench's floor: what a guest can do with the least code possible. It shares nothing with the agent.

mod boot;
mod conversation;

/// The port by which the bench speaks to us.
const PORT_NAME: &str = "floor.0";

fn main() {
    // The kernel panics when PID 1 exits, and the bench shows the console's last words.
    if let Err(error) = boot::boot().and_then(|()| conversation::converse(PORT_NAME)) {
        boot::say(&format!("the bench's guest failed to {error:#}"));
    }
}
