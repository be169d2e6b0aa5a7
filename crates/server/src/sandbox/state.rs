//! The rules of a sandbox's life: pure, total, in one place.

use api::SandboxStatus;

/// What a sandbox is. Written to its row with every change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum State {
    Creating,
    Running,
    /// Its virtual CPUs stand still; memory and process stay.
    Paused,
    /// Memory and disk lie in the store; there is no process.
    Hibernated,
    /// Powered off; the disk is kept.
    Stopped,
    /// The virtual machine ended by itself, or could not be found again.
    Failed,
}

/// What a sandbox is to become. The only thing a request changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Target {
    Running,
    Paused,
    Hibernated,
    Stopped,
    Deleted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// Restore the saved machine, repair it, open it to requests.
    Start,
    /// Have the guest power off, end the process.
    PowerOff,
    /// Boot from the disk that was kept.
    PowerOn,
    Pause,
    Resume,
    /// Save memory and disk, end the process.
    Hibernate,
    /// Restore what the hibernation saved.
    Wake,
    /// End the machine, give back everything it had, forget the row.
    Remove,
}

/// The step that brings `state` closer to `target`; `None` when there is none.
pub(crate) fn next_step(state: State, target: Target) -> Option<Step> {
    match (state, target) {
        (_, Target::Deleted) => Some(Step::Remove),
        (
            State::Creating,
            Target::Running | Target::Paused | Target::Hibernated | Target::Stopped,
        ) => Some(Step::Start),
        (State::Running, Target::Paused) => Some(Step::Pause),
        (State::Running | State::Paused, Target::Hibernated) => Some(Step::Hibernate),
        (State::Running, Target::Stopped) => Some(Step::PowerOff),
        // Only a guest that runs can power itself off.
        (State::Paused, Target::Running | Target::Stopped) => Some(Step::Resume),
        (State::Hibernated, Target::Running | Target::Paused | Target::Stopped) => Some(Step::Wake),
        (State::Stopped | State::Failed, Target::Running) => Some(Step::PowerOn),
        (State::Running, Target::Running)
        | (State::Paused, Target::Paused)
        | (State::Hibernated, Target::Hibernated)
        | (State::Stopped | State::Failed, Target::Stopped | Target::Paused | Target::Hibernated) => {
            None
        }
    }
}

/// The target of a sandbox that stays as it is: after a step that failed.
pub(crate) fn rest(state: State) -> Target {
    match state {
        State::Creating | State::Running => Target::Running,
        State::Paused => Target::Paused,
        State::Hibernated => Target::Hibernated,
        State::Stopped | State::Failed => Target::Stopped,
    }
}

/// What its users are told.
pub(crate) fn shown(state: State, target: Target) -> SandboxStatus {
    match (state, target) {
        (_, Target::Deleted) => SandboxStatus::Deleting,
        (state, Target::Running | Target::Paused | Target::Hibernated | Target::Stopped) => {
            match state {
                State::Creating => SandboxStatus::Creating,
                State::Running => SandboxStatus::Running,
                State::Paused => SandboxStatus::Paused,
                State::Hibernated => SandboxStatus::Hibernated,
                State::Stopped => SandboxStatus::Stopped,
                State::Failed => SandboxStatus::Failed,
            }
        }
    }
}

/// What a request wants of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wish {
    /// Commands and files: only a running guest can.
    Inside,
    /// Time to live and the like.
    Change,
    Pause,
    /// That it runs again, paused or hibernated.
    Run,
    Hibernate,
    /// Its memory and disk as they are now.
    Snapshot,
    PowerOff,
    /// That it runs, also when it was powered off.
    PowerOn,
    /// Other disks: only while no machine has them.
    Disks,
    /// Once more is as good as once.
    Delete,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Refusal {
    /// To its users it exists no longer.
    Gone,
    NotYetRunning,
    Paused,
    /// Wake it first, or go that way.
    Hibernated,
    Stopped,
    Failed,
    /// Stop it first.
    NotStopped,
    /// Attach a root disk first.
    NoRootDisk,
}

/// Where a sandbox's root disk is, and what it is worth after its machine has died.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RootDisk {
    /// Its own, and not flushed when the guest flushes: whole after an orderly end alone.
    Own,
    /// A volume of its own, on which everything is that the guest has flushed.
    Volume,
    /// It was detached.
    None,
}

/// Whether a sandbox without a machine can be booted.
///
/// # Errors
/// Why not.
pub(crate) fn can_boot(state: State, disk: RootDisk) -> Result<(), Refusal> {
    match (state, disk) {
        (State::Stopped | State::Failed, RootDisk::None) => Err(Refusal::NoRootDisk),
        (State::Failed, RootDisk::Own) => Err(Refusal::Failed),
        (State::Stopped, RootDisk::Own | RootDisk::Volume)
        | (State::Failed, RootDisk::Volume)
        | (State::Creating | State::Running | State::Paused | State::Hibernated, _) => Ok(()),
    }
}

/// Whether a request may go on.
///
/// # Errors
/// Why not.
pub(crate) fn accept(state: State, target: Target, wish: Wish) -> Result<(), Refusal> {
    match (state, target, wish) {
        (_, _, Wish::Delete) => Ok(()),
        (_, Target::Deleted, _) => Err(Refusal::Gone),
        (_, _, Wish::Change) => Ok(()),
        (State::Creating, _, _) => Err(Refusal::NotYetRunning),
        (State::Stopped, _, Wish::PowerOff)
        | (State::Stopped | State::Failed, _, Wish::PowerOn | Wish::Disks) => Ok(()),
        (State::Stopped, _, _) => Err(Refusal::Stopped),
        (State::Failed, _, _) => Err(Refusal::Failed),
        (
            State::Running | State::Paused | State::Hibernated,
            _,
            Wish::Run | Wish::Hibernate | Wish::Snapshot | Wish::PowerOff | Wish::PowerOn,
        ) => Ok(()),
        (State::Running | State::Paused | State::Hibernated, _, Wish::Disks) => {
            Err(Refusal::NotStopped)
        }
        (State::Running | State::Paused, _, Wish::Pause) => Ok(()),
        (State::Hibernated, _, Wish::Pause) => Err(Refusal::Hibernated),
        (State::Running, Target::Running, Wish::Inside) => Ok(()),
        (State::Paused, _, Wish::Inside) | (State::Running, Target::Paused, Wish::Inside) => {
            Err(Refusal::Paused)
        }
        (State::Hibernated, _, Wish::Inside)
        | (State::Running, Target::Hibernated, Wish::Inside) => Err(Refusal::Hibernated),
        (State::Running, Target::Stopped, Wish::Inside) => Err(Refusal::Stopped),
    }
}

macro_rules! names {
    ($type:ty { $($variant:ident => $name:literal),* $(,)? }) => {
        impl $type {
            /// As its row says it.
            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            pub(crate) fn from_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|value| value.name() == name)
            }

            const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];
        }
    };
}

names!(State {
    Creating => "creating", Running => "running", Paused => "paused", Hibernated => "hibernated",
    Stopped => "stopped", Failed => "failed",
});
names!(Target {
    Running => "running", Paused => "paused", Hibernated => "hibernated", Stopped => "stopped",
    Deleted => "deleted",
});

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn states() -> impl Strategy<Value = State> {
        prop::sample::select(State::ALL.to_vec())
    }

    fn targets() -> impl Strategy<Value = Target> {
        prop::sample::select(Target::ALL.to_vec())
    }

    /// `None`: the row is gone.
    fn after(step: Step) -> Option<State> {
        match step {
            Step::Start | Step::Resume | Step::Wake | Step::PowerOn => Some(State::Running),
            Step::PowerOff => Some(State::Stopped),
            Step::Pause => Some(State::Paused),
            Step::Hibernate => Some(State::Hibernated),
            Step::Remove => None,
        }
    }

    proptest! {
        #[test]
        fn the_driver_always_comes_to_rest_where_it_was_sent(state in states(), target in targets()) {
            let mut now = Some(state);
            for _ in 0..3 {
                let Some(step) = now.and_then(|state| next_step(state, target)) else { break };
                now = after(step);
            }
            prop_assert_eq!(now.and_then(|state| next_step(state, target)), None);
            prop_assert_eq!(now.is_none(), target == Target::Deleted);
            // Without a machine there is nothing to pause or to hibernate.
            let is_off = matches!(state, State::Stopped | State::Failed);
            if let Some(now) = now.filter(|_| !is_off || matches!(target, Target::Running | Target::Stopped)) {
                prop_assert_eq!(rest(now), target);
            }
        }

        #[test]
        fn disks_change_while_no_machine_has_them(state in states(), target in targets()) {
            let off = matches!(state, State::Stopped | State::Failed) && target != Target::Deleted;
            prop_assert_eq!(accept(state, target, Wish::Disks).is_ok(), off);
        }

        #[test]
        fn a_sandbox_whose_step_failed_stays_as_it_is(state in states()) {
            if state != State::Creating {
                prop_assert_eq!(next_step(state, rest(state)), None);
            }
        }

        #[test]
        fn nothing_reaches_the_inside_of_a_sandbox_that_is_not_running(state in states(), target in targets()) {
            let open = accept(state, target, Wish::Inside).is_ok();
            prop_assert_eq!(open, (state, target) == (State::Running, Target::Running));
        }

        #[test]
        fn a_sandbox_can_be_deleted_in_every_state(state in states(), target in targets()) {
            prop_assert!(accept(state, target, Wish::Delete).is_ok());
            prop_assert_eq!(next_step(state, Target::Deleted), Some(Step::Remove));
        }

        #[test]
        fn what_is_off_can_be_started_and_what_runs_can_be_stopped(state in states(), target in targets()) {
            let there = state != State::Creating && target != Target::Deleted;
            prop_assert_eq!(accept(state, target, Wish::PowerOn).is_ok(), there);
            prop_assert_eq!(accept(state, target, Wish::PowerOff).is_ok(), there && state != State::Failed);
        }

        #[test]
        fn a_row_keeps_states_and_targets(state in states(), target in targets()) {
            prop_assert_eq!(State::from_name(state.name()), Some(state));
            prop_assert_eq!(Target::from_name(target.name()), Some(target));
        }
    }

    #[test]
    fn what_failed_boots_again_only_from_a_disk_that_was_flushed() {
        let table = [
            (State::Stopped, RootDisk::Own, Ok(())),
            (State::Stopped, RootDisk::Volume, Ok(())),
            (State::Stopped, RootDisk::None, Err(Refusal::NoRootDisk)),
            (State::Failed, RootDisk::Own, Err(Refusal::Failed)),
            (State::Failed, RootDisk::Volume, Ok(())),
            (State::Failed, RootDisk::None, Err(Refusal::NoRootDisk)),
        ];
        for (state, disk, expected) in table {
            assert_eq!(can_boot(state, disk), expected, "{state:?} {disk:?}");
        }
    }
}
