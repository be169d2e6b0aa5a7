//! Volumes: create, get, list, grow, delete. Where one is named, its id will do as well.

use api::{CreateVolume, UpdateVolume, Volume, VolumeList, VolumeName};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    pub async fn create_volume(&self, request: &CreateVolume) -> Result<Volume, Error> {
        self.json(self.request(Method::POST, "/v1/volumes").json(request)).await
    }

    pub async fn volumes(&self) -> Result<Vec<Volume>, Error> {
        let list: VolumeList = self.json(self.request(Method::GET, "/v1/volumes")).await?;
        Ok(list.volumes)
    }

    pub async fn volume(&self, name: &VolumeName) -> Result<Volume, Error> {
        self.json(self.request(Method::GET, &format!("/v1/volumes/{name}"))).await
    }

    pub async fn update_volume(
        &self,
        name: &VolumeName,
        update: &UpdateVolume,
    ) -> Result<Volume, Error> {
        self.json(self.request(Method::PATCH, &format!("/v1/volumes/{name}")).json(update)).await
    }

    pub async fn delete_volume(&self, name: &VolumeName) -> Result<(), Error> {
        self.send(self.request(Method::DELETE, &format!("/v1/volumes/{name}"))).await.map(drop)
    }
}
