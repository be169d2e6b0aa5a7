//! Counts what passed and what failed, also from the output of the programs that ran it.

use std::{fmt, ops::AddAssign};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

impl Tally {
    pub(crate) const PASSED: Self = Self { passed: 1, failed: 0 };
    pub(crate) const FAILED: Self = Self { passed: 0, failed: 1 };

    /// From `test result: ok. 3 passed; 0 failed; …` of a test program, or from `3 passed, 0 failed` of the scenarios.
    pub(crate) fn of_line(line: &str) -> Option<Self> {
        let counts = match line.strip_prefix("test result: ") {
            Some(rest) => rest.split_once(". ")?.1,
            None => line,
        };
        let mut parts = counts.split([',', ';']).map(str::trim);
        let passed = parts.next()?.strip_suffix(" passed")?.parse().ok()?;
        let failed = parts.next()?.strip_suffix(" failed")?.parse().ok()?;
        Some(Self { passed, failed })
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
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
            assert_eq!(Tally::of_line(line), Some(Tally { passed: 12, failed: 1 }), "{line}");
        }
    }

    #[test]
    fn other_lines_count_nothing() {
        for line in ["", "running 3 tests", "test a_claim ... ok", "ok   files  1.0 s  3 passed"] {
            assert_eq!(Tally::of_line(line), None, "{line}");
        }
    }

    #[test]
    fn a_tally_is_read_as_it_is_shown() {
        let tally = Tally { passed: 7, failed: 2 };
        assert_eq!(Tally::of_line(&tally.to_string()), Some(tally));
    }
}
