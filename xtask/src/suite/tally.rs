//! Counts what passed and what failed, also from the output of the programs that ran it.

use std::{fmt, ops::AddAssign};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Passed when they ran again.
    pub(crate) unsteady: u64,
}

/// Begins a line about one that had failed and holds now.
const UNSTEADY: &str = "unsteady: ";

impl Tally {
    pub(crate) const PASSED: Self = Self { passed: 1, failed: 0, unsteady: 0 };
    pub(crate) const FAILED: Self = Self { passed: 0, failed: 1, unsteady: 0 };

    /// From `test result: ok. 3 passed; 0 failed; …` of a test program, or from `3 passed, 0 failed` of the scenarios.
    pub(crate) fn of_line(line: &str) -> Option<Self> {
        let counts = match line.strip_prefix("test result: ") {
            Some(rest) => rest.split_once(". ")?.1,
            None => line,
        };
        let mut parts = counts.split([',', ';']).map(str::trim);
        let passed = parts.next()?.strip_suffix(" passed")?.parse().ok()?;
        let failed = parts.next()?.strip_suffix(" failed")?.parse().ok()?;
        Some(Self { passed, failed, unsteady: 0 })
    }

    /// Takes in a line of a program's output. One that is unsteady was counted as failed before it ran again.
    pub(crate) fn take_in(&mut self, line: &str) {
        if let Some(counts) = Self::of_line(line) {
            *self += counts;
        } else if line.starts_with(UNSTEADY) {
            self.failed = self.failed.saturating_sub(1);
            self.unsteady += 1;
        }
    }
}

/// From `test NAME ... FAILED` of a test program, or from `FAIL NAME …` of the scenarios.
pub(super) fn failed_test(line: &str) -> Option<&str> {
    match line.strip_prefix("FAIL ") {
        Some(rest) => rest.split_whitespace().next(),
        None => line.strip_prefix("test ")?.strip_suffix(" ... FAILED"),
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.unsteady += other.unsteady;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_summary_are_counted() {
        let lines = [
            "test result: FAILED. 12 passed; 1 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "12 passed, 1 failed",
        ];
        for line in lines {
            assert_eq!(
                Tally::of_line(line),
                Some(Tally { passed: 12, failed: 1, unsteady: 0 }),
                "{line}"
            );
        }
    }

    #[test]
    fn the_names_of_what_failed_are_found() {
        assert_eq!(failed_test("test a::b::a_claim ... FAILED"), Some("a::b::a_claim"));
        assert_eq!(failed_test("FAIL files            12.0 s  why"), Some("files"));
        for line in
            ["test a_claim ... ok", "ok   files  1.0 s", "test result: FAILED. 1 passed; 1 failed;"]
        {
            assert_eq!(failed_test(line), None, "{line}");
        }
    }

    #[test]
    fn other_lines_count_nothing() {
        for line in ["", "running 3 tests", "test a_claim ... ok", "ok   files  1.0 s  3 passed"] {
            assert_eq!(Tally::of_line(line), None, "{line}");
        }
    }

    #[test]
    fn what_failed_and_held_again_is_unsteady() {
        let mut tally = Tally::default();
        for line in [
            "test result: FAILED. 5 passed; 2 failed; 0 ignored",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored",
            "unsteady: a_claim",
        ] {
            tally.take_in(line);
        }
        assert_eq!(tally, Tally { passed: 6, failed: 2, unsteady: 1 });
    }

    #[test]
    fn a_tally_is_read_as_it_is_shown() {
        let tally = Tally { passed: 7, failed: 2, unsteady: 0 };
        assert_eq!(Tally::of_line(&tally.to_string()), Some(tally));
    }
}
