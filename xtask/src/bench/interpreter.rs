//! The measurements of the interpreter: its first chart, and a cell that does nothing.

use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};

use super::{
    figures::{Samples, Target},
    measure::{Bench, Group, SETTLE, time},
};
use crate::{api::id_of, wait};

const CHARTS: usize = 11;
const CELLS: usize = 60;
const CHART: &str = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()";
const FLOOR: &str = include_str!("kernel.py");

pub(crate) const GROUPS: &[Group] = &[
    Group { rows: &[time("first_chart", Target::Ratio(1.2))], measure: Bench::first_charts },
    Group { rows: &[time("cell", Target::Ratio(1.3))], measure: Bench::cells },
];

impl Bench {
    /// The floor: a machine that was saved with a bare kernel which had drawn once; restored, and told to draw.
    fn first_charts(&self) -> anyhow::Result<Vec<Samples>> {
        let mut guest = self.floor.prepare()?.restore()?;
        guest.put("/srv/kernel.py", FLOOR.as_bytes())?;
        guest.run("nohup python3 /srv/kernel.py serve > /srv/log 2>&1 < /dev/null &")?;
        guest.run("for n in $(seq 240); do test -e /tmp/ready && exit; sleep 0.5; done; cat /srv/log >&2; exit 1")?;
        let save = guest.save(&self.floor, self.floor.sibling("with-a-kernel"))?;
        guest.quit()?;
        let mut samples = Samples::default();
        for round in 0..CHARTS {
            wait::check_interrupt()?;
            let prepared = save.bake.prepare()?;
            wait::pause(SETTLE);
            let begun = Instant::now();
            let mut guest = prepared.restore()?;
            guest.run("echo > /tmp/in; read word < /tmp/out; test \"$word\" = done")?;
            let floor = begun.elapsed();
            guest.quit()?;

            wait::pause(SETTLE);
            let begun = Instant::now();
            let sandbox = self.api.create(&self.request())?;
            let id = id_of(&sandbox)?;
            let (session, chart) = self.session(id).and_then(|session| {
                let chart = self.run_cell(id, &session, CHART)?;
                Ok((session, chart))
            })?;
            let ours = begun.elapsed();
            let is_drawn = chart["results"][0]["type"] == "image/png";
            anyhow::ensure!(is_drawn, "draw in {session}: {chart}");
            self.api.delete(&format!("/v1/sandboxes/{id}"))?;
            // The first finds cold caches, in both.
            if round > 0 {
                samples.push_times(ours, floor);
            }
        }
        Ok(vec![samples])
    }

    /// The floor: the same cell in a bare kernel of the same sandbox, as its client in there sees it.
    fn cells(&self) -> anyhow::Result<Vec<Samples>> {
        let sandbox = self.api.create(&self.request())?;
        let id = id_of(&sandbox)?;
        self.api.put(&format!("/v1/sandboxes/{id}/fs?path=/srv/kernel.py"), FLOOR.as_bytes())?;
        let command = format!("python3 /srv/kernel.py rounds {CELLS}");
        let told = self.api.post(&format!("/v1/sandboxes/{id}/exec"), &json!({"cmd": command}))?;
        let text = told["stdout"].as_str().unwrap_or_default();
        let mut samples = Samples::default();
        // The kernel greets there, too. The first cells warm it up.
        let rounds = text.lines().filter_map(|line| line.parse::<f64>().ok());
        samples.floor.extend(rounds.skip(3));
        ensure!(!samples.floor.is_empty(), "measure the floor of a cell: {told}");
        let session = self.session(id)?;
        for round in 0..CELLS {
            wait::check_interrupt()?;
            let begun = Instant::now();
            self.run_cell(id, &session, "1 + 1")?;
            if round >= 3 {
                samples.ours.push(begun.elapsed().as_secs_f64() * 1000.0);
            }
        }
        wait::pause(Duration::from_millis(100));
        self.api.delete(&format!("/v1/sandboxes/{id}"))?;
        Ok(vec![samples])
    }

    fn session(&self, sandbox: &str) -> anyhow::Result<String> {
        let path = format!("/v1/sandboxes/{sandbox}/repl/sessions");
        let session = self.api.post(&path, &json!({"language": "python"}))?;
        Ok(id_of(&session)?.to_owned())
    }

    fn run_cell(&self, sandbox: &str, session: &str, code: &str) -> anyhow::Result<Value> {
        let path = format!("/v1/sandboxes/{sandbox}/repl/sessions/{session}/run");
        self.api.post(&path, &json!({ "code": code }))
    }
}
