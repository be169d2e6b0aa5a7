//! The measurements of machines: off, and on again.

use std::time::Instant;

use serde_json::json;

use super::{
    figures::{Samples, Target},
    measure::{Bench, Group, SETTLE, time},
};
use crate::{api::id_of, wait};

const ROUNDS: usize = 5;

pub(crate) const GROUPS: &[Group] = &[Group {
    rows: &[time("machine_stop", Target::None), time("machine_start", Target::Ratio(2.0))],
    measure: Bench::stops_and_starts,
}];

impl Bench {
    /// The floor of the start: from the first instruction of the kernel to the guest's first answer. Of the stop: the end of
    /// that process.
    fn stops_and_starts(&self) -> anyhow::Result<Vec<Samples>> {
        let (mut stops, mut starts) = (Samples::default(), Samples::default());
        // Baked first, where it never was.
        let size =
            json!({"template": self.template, "cpu": 1, "memory_mb": 512, "disk_mb": 10_240});
        let first = self.api.create_patiently(&size)?;
        self.api.delete(&format!("/v1/sandboxes/{}", id_of(&first)?))?;
        let request =
            json!({"stack": self.template, "vcpus": 1, "memory_mb": 512, "rootfs_size_gb": 10});
        let machine = self.api.post("/v1/machines", &request)?;
        let path = format!("/v1/machines/{}", id_of(&machine)?);
        for _ in 0..ROUNDS {
            wait::check_interrupt()?;
            wait::pause(SETTLE);
            let (guest, floor_start) = self.small_floor.boot()?;
            let begun = Instant::now();
            guest.quit()?;
            let floor_stop = begun.elapsed();

            wait::pause(SETTLE);
            let begun = Instant::now();
            self.api.post_empty(&format!("{path}/stop"))?;
            stops.push_times(begun.elapsed(), floor_stop);
            wait::pause(SETTLE);
            let begun = Instant::now();
            self.api.post_empty(&format!("{path}/start"))?;
            starts.push_times(begun.elapsed(), floor_start);
        }
        self.api.delete(&path)?;
        Ok(vec![stops, starts])
    }
}
