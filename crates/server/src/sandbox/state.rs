//! The rules of a sandbox's life: pure, total, in one place.

use api::SandboxStatus;

/// What a sandbox is. Written to its row with every change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum State {
    Creating,
    Running,
    /// The guest powered itself off; the disk is kept.
    Stopped,
    /// The virtual machine ended by itself, or could not be found again.
    Failed,
}

/// What a sandbox is to become. The only thing a request changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Target {
    Running,
    Deleted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// Restore the baked machine, repair it, open it to requests.
    Start,
    /// End the machine, give back everything it had, forget the row.
    Remove,
}

/// The step that brings `state` closer to `target`; `None` when there is none.
pub(crate) fn next_step(state: State, target: Target) -> Option<Step> {
    match (state, target) {
        (State::Creating, Target::Running) => Some(Step::Start),
        (State::Creating | State::Running | State::Stopped | State::Failed, Target::Deleted) => {
            Some(Step::Remove)
        }
        (State::Running | State::Stopped | State::Failed, Target::Running) => None,
    }
}

/// What its users are told.
pub(crate) fn shown(state: State, target: Target) -> SandboxStatus {
    match (state, target) {
        (_, Target::Deleted) => SandboxStatus::Deleting,
        (State::Creating, Target::Running) => SandboxStatus::Creating,
        (State::Running, Target::Running) => SandboxStatus::Running,
        (State::Stopped, Target::Running) => SandboxStatus::Stopped,
        (State::Failed, Target::Running) => SandboxStatus::Failed,
    }
}

/// What a request wants of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wish {
    /// Commands and files: only a running guest can.
    Inside,
    /// Time to live and the like.
    Change,
    /// Once more is as good as once.
    Delete,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Refusal {
    /// To its users it exists no longer.
    Gone,
    NotYetRunning,
    Stopped,
    Failed,
}

/// Whether a request may go on.
///
/// # Errors
/// Why not.
pub(crate) fn accept(state: State, target: Target, wish: Wish) -> Result<(), Refusal> {
    match (state, target, wish) {
        (_, Target::Deleted, Wish::Delete) | (_, Target::Running, Wish::Change | Wish::Delete) => {
            Ok(())
        }
        (_, Target::Deleted, Wish::Inside | Wish::Change) => Err(Refusal::Gone),
        (State::Running, Target::Running, Wish::Inside) => Ok(()),
        (State::Creating, Target::Running, Wish::Inside) => Err(Refusal::NotYetRunning),
        (State::Stopped, Target::Running, Wish::Inside) => Err(Refusal::Stopped),
        (State::Failed, Target::Running, Wish::Inside) => Err(Refusal::Failed),
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
                [$(Self::$variant),*].into_iter().find(|value| value.name() == name)
            }
        }
    };
}

names!(State { Creating => "creating", Running => "running", Stopped => "stopped", Failed => "failed" });
names!(Target { Running => "running", Deleted => "deleted" });

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn states() -> impl Strategy<Value = State> {
        prop::sample::select(vec![State::Creating, State::Running, State::Stopped, State::Failed])
    }

    fn targets() -> impl Strategy<Value = Target> {
        prop::sample::select(vec![Target::Running, Target::Deleted])
    }

    /// `None`: the row is gone.
    fn after(step: Step) -> Option<State> {
        match step {
            Step::Start => Some(State::Running),
            Step::Remove => None,
        }
    }

    proptest! {
        #[test]
        fn the_driver_always_comes_to_rest(state in states(), target in targets()) {
            let mut now = Some(state);
            for _ in 0..3 {
                let Some(step) = now.and_then(|state| next_step(state, target)) else { break };
                now = after(step);
            }
            prop_assert_eq!(now.and_then(|state| next_step(state, target)), None);
            prop_assert_eq!(now.is_none(), target == Target::Deleted);
        }

        #[test]
        fn nothing_reaches_the_inside_of_a_sandbox_that_is_not_running(state in states(), target in targets()) {
            let open = accept(state, target, Wish::Inside).is_ok();
            prop_assert_eq!(open, shown(state, target) == SandboxStatus::Running);
        }

        #[test]
        fn a_sandbox_can_be_deleted_in_every_state(state in states(), target in targets()) {
            prop_assert!(accept(state, target, Wish::Delete).is_ok());
            prop_assert_eq!(next_step(state, Target::Deleted), Some(Step::Remove));
        }

        #[test]
        fn a_row_keeps_states_and_targets(state in states(), target in targets()) {
            prop_assert_eq!(State::from_name(state.name()), Some(state));
            prop_assert_eq!(Target::from_name(target.name()), Some(target));
        }
    }
}
