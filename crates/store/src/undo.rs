//! Half-done work takes itself back.

/// Steps to take back, last first, when it is dropped without [`Undo::keep`].
#[derive(Default)]
#[must_use = "dropping it takes the steps back"]
pub struct Undo<'a> {
    steps: Vec<Box<dyn FnOnce() + Send + 'a>>,
}

impl<'a> Undo<'a> {
    pub fn new() -> Self {
        Self::default()
    }

    /// To be called right after a step succeeded. `step` copes by itself with what it cannot undo.
    pub fn push(&mut self, step: impl FnOnce() + Send + 'a) {
        self.steps.push(Box::new(step));
    }

    /// All is done; nothing is taken back.
    pub fn keep(mut self) {
        self.steps.clear();
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        while let Some(step) = self.steps.pop() {
            step();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn steps_are_taken_back_last_first() {
        let seen = Mutex::new(Vec::new());
        let mut undo = Undo::new();
        for n in 1..=3 {
            let seen = &seen;
            undo.push(move || seen.lock().unwrap().push(n));
        }
        drop(undo);
        assert_eq!(*seen.lock().unwrap(), [3, 2, 1]);
    }

    #[test]
    fn a_kept_operation_is_left_alone() {
        let seen = Mutex::new(0);
        let mut undo = Undo::new();
        undo.push(|| *seen.lock().unwrap() += 1);
        undo.keep();
        assert_eq!(*seen.lock().unwrap(), 0);
    }
}
