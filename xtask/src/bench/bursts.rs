//! Row `leak_500`: what the server's own memory grows by over five hundred creates and deletes, a third of them broken off.

use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{
    figures::Samples,
    measure::{Bench, at_once},
};
use crate::{
    api::{Api, id_of},
    wait,
};

const BURSTS: usize = 10;
const AT_ONCE: usize = 50;
/// Of a create in a burst, over all times that the server asks to come again.
const PATIENCE: Duration = Duration::from_secs(240);
const AGAIN: Duration = Duration::from_millis(200);

impl Bench {
    /// Without a floor. A first burst has the server take what it needs for so many at once.
    pub(super) fn leak(&self) -> anyhow::Result<Vec<Samples>> {
        self.burst("before")?;
        let before = self.server.memory_megabytes()?;
        for round in 0..BURSTS {
            wait::check_interrupt()?;
            self.burst(&round.to_string())?;
        }
        let growth = self.server.memory_megabytes()? - before;
        Ok(vec![Samples { ours: vec![growth], floor: Vec::new() }])
    }

    fn burst(&self, tag: &str) -> anyhow::Result<()> {
        at_once((0..AT_ONCE).collect(), |number| self.one_of_a_burst(tag, number))?;
        // Whom nobody waited for.
        wait::until("the end of a burst", PATIENCE, AGAIN, || {
            self.api.delete_all()?;
            let left = self.api.get_json("/v1/sandboxes")?;
            Ok(left.as_array().is_some_and(Vec::is_empty).then_some(()))
        })
    }

    fn one_of_a_burst(&self, tag: &str, number: usize) -> anyhow::Result<()> {
        let name = format!("{tag}-{number}");
        let request = json!({
            "template": self.template, "ttl_seconds": 1800, "metadata": {"burst": name},
        });
        let api = self.server.api();
        match number % 9 {
            // Its client goes away.
            2 => {
                let patience = Duration::from_millis(20 + 37 * number as u64);
                let impatient = Api::patient_for(&self.server.url, &self.server.key, patience);
                // Answered, refused or left; the sandbox, if there is one, is deleted after the burst.
                let _ = impatient.create_unless_busy(&request);
                Ok(())
            }
            // Deleted as soon as it is listed, perhaps while it is created.
            5 => std::thread::scope(|scope| {
                let creating = scope.spawn(|| self.server.api().create_unless_busy(&request));
                while !creating.is_finished() {
                    let path = format!("/v1/sandboxes?metadata.burst={name}");
                    if let Some(found) = api.get_json(&path)?.as_array().and_then(|all| all.first())
                    {
                        return delete(&api, found);
                    }
                    wait::pause(AGAIN);
                }
                Ok(())
            }),
            // Its machine is killed.
            8 => {
                let sandbox = self.patiently(&api, &request)?;
                let pid = i32::try_from(self.server.machine_of(id_of(&sandbox)?)?)?;
                kill_process(Pid::from_raw(pid).context("name a process")?, Signal::KILL)?;
                delete(&api, &sandbox)
            }
            _ => {
                let sandbox = self.patiently(&api, &request)?;
                api.exec(id_of(&sandbox)?, "true")?;
                delete(&api, &sandbox)
            }
        }
    }

    fn patiently(&self, api: &Api, request: &Value) -> anyhow::Result<Value> {
        wait::until("room for a sandbox", PATIENCE, AGAIN, || api.create_unless_busy(request))
    }
}

fn delete(api: &Api, sandbox: &Value) -> anyhow::Result<()> {
    let path = format!("/v1/sandboxes/{}", id_of(sandbox)?);
    match api.delete(&path) {
        Err(error) if api.get(&path).is_ok() => bail!("{error:#}"),
        Ok(()) | Err(_) => Ok(()),
    }
}
