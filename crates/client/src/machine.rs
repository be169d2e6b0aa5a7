//! Machines: create, get, list, start, stop, delete, and the volumes of one that is stopped.

use api::{
    AttachVolume, CreateMachine, DetachVolume, Machine, MachineList, SandboxId, Volume, VolumeName,
};
use reqwest::Method;

use crate::{Client, Error};

/// What becomes of a machine's root disk when the machine is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootDisk {
    Goes,
    /// As a volume, from which another machine can boot.
    Stays,
}

impl Client {
    pub async fn create_machine(&self, request: &CreateMachine) -> Result<Machine, Error> {
        self.json(self.request(Method::POST, "/v1/machines").json(request)).await
    }

    /// Newest first.
    pub async fn machines(&self) -> Result<Vec<Machine>, Error> {
        let list: MachineList = self.json(self.request(Method::GET, "/v1/machines")).await?;
        Ok(list.machines)
    }

    pub async fn machine(&self, id: &SandboxId) -> Result<Machine, Error> {
        self.json(self.request(Method::GET, &format!("/v1/machines/{id}"))).await
    }

    /// It has booted when this returns.
    pub async fn start_machine(&self, id: &SandboxId) -> Result<Machine, Error> {
        self.json(self.request(Method::POST, &format!("/v1/machines/{id}/start"))).await
    }

    /// It is off when this returns.
    pub async fn stop_machine(&self, id: &SandboxId) -> Result<Machine, Error> {
        self.json(self.request(Method::POST, &format!("/v1/machines/{id}/stop"))).await
    }

    pub async fn delete_machine(&self, id: &SandboxId, root_disk: RootDisk) -> Result<(), Error> {
        let query = match root_disk {
            RootDisk::Goes => "",
            RootDisk::Stays => "?preserve_storage=true",
        };
        let path = format!("/v1/machines/{id}{query}");
        self.send(self.request(Method::DELETE, &path)).await.map(drop)
    }

    /// Its id will do as well. The machine has to be stopped.
    pub async fn attach_volume(
        &self,
        volume: &VolumeName,
        machine: &SandboxId,
    ) -> Result<Volume, Error> {
        let request = AttachVolume { machine_id: machine.to_string() };
        let path = format!("/v1/volumes/{volume}/attach");
        self.json(self.request(Method::POST, &path).json(&request)).await
    }

    /// From this machine, or from whichever has it. The machine has to be stopped.
    pub async fn detach_volume(
        &self,
        volume: &VolumeName,
        machine: Option<&SandboxId>,
    ) -> Result<Volume, Error> {
        let request = DetachVolume { machine_id: machine.map(ToString::to_string) };
        let path = format!("/v1/volumes/{volume}/detach");
        self.json(self.request(Method::POST, &path).json(&request)).await
    }
}
