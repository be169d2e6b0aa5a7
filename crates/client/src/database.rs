//! Databases: create, reach, list, clone, delete.

use std::time::{Duration, Instant};

use api::{
    CloneDatabase, CreateDatabase, Database, DatabaseConnection, DatabaseId, DatabaseList,
    DatabaseStatus, UpdateDatabase,
};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    /// Answers before it can be reached; see [`Client::database_ready`].
    pub async fn create_database(&self, request: &CreateDatabase) -> Result<Database, Error> {
        self.json(self.request(Method::POST, "/v1/databases").json(request)).await
    }

    /// Newest first, without passwords.
    pub async fn databases(&self) -> Result<Vec<Database>, Error> {
        let list: DatabaseList = self.json(self.request(Method::GET, "/v1/databases")).await?;
        Ok(list.items)
    }

    /// The server waits for one that is being made, for some seconds.
    pub async fn database(&self, id: &DatabaseId) -> Result<Database, Error> {
        self.json(self.request(Method::GET, &format!("/v1/databases/{id}"))).await
    }

    /// As it is when it is made, or could not be, or the time is up.
    pub async fn database_ready(
        &self,
        id: &DatabaseId,
        within: Duration,
    ) -> Result<Database, Error> {
        let until = Instant::now() + within;
        loop {
            let database = self.database(id).await?;
            if database.status != DatabaseStatus::Provisioning || Instant::now() >= until {
                return Ok(database);
            }
        }
    }

    pub async fn database_connection(&self, id: &DatabaseId) -> Result<DatabaseConnection, Error> {
        self.json(self.request(Method::GET, &format!("/v1/databases/{id}/connection"))).await
    }

    pub async fn update_database(
        &self,
        id: &DatabaseId,
        update: &UpdateDatabase,
    ) -> Result<Database, Error> {
        self.json(self.request(Method::PATCH, &format!("/v1/databases/{id}")).json(update)).await
    }

    /// Goes on behind the answer.
    pub async fn wake_database(&self, id: &DatabaseId) -> Result<Database, Error> {
        self.json(self.request(Method::POST, &format!("/v1/databases/{id}/wake"))).await
    }

    /// Answers before the clone can be reached.
    pub async fn clone_database(
        &self,
        id: &DatabaseId,
        request: &CloneDatabase,
    ) -> Result<Database, Error> {
        let path = format!("/v1/databases/{id}/clone");
        self.json(self.request(Method::POST, &path).json(request)).await
    }

    pub async fn reset_database_credentials(&self, id: &DatabaseId) -> Result<Database, Error> {
        let path = format!("/v1/databases/{id}/reset-credentials");
        self.json(self.request(Method::POST, &path)).await
    }

    pub async fn delete_database(&self, id: &DatabaseId) -> Result<(), Error> {
        self.send(self.request(Method::DELETE, &format!("/v1/databases/{id}"))).await.map(drop)
    }
}
