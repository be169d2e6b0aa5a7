//! What a machine's memory costs the host.

use std::io;

/// Pages that are the process's own, in memory or swapped out. Pages of a file are not, even where nobody else maps them
/// yet; nor is `Private_Dirty` the right count, for that includes a file's pages not yet written back.
pub(crate) fn private_bytes(pid: u32) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    Ok(sum(&text))
}

fn sum(smaps_rollup: &str) -> u64 {
    let kilobytes = |line: &str| line.split_whitespace().nth(1)?.parse::<u64>().ok();
    let counted = smaps_rollup
        .lines()
        .filter(|line| ["Anonymous:", "Swap:"].iter().any(|field| line.starts_with(field)));
    counted.filter_map(kilobytes).sum::<u64>() * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_files_are_not_counted() {
        let text = "5581-7ffe ---p 00000000 00:00 0 [rollup]\nRss: 90000 kB\nPss: 30000 kB\nShared_Clean: 60000 kB\n\
                    Private_Clean: 1000 kB\nPrivate_Dirty: 40000 kB\nAnonymous: 27000 kB\nSwap: 500 kB\nSwapPss: 500 kB\n";
        assert_eq!(sum(text), 27_500 * 1024);
    }
}
