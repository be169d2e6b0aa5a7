//! Templates and their builds.

use api::{Build, Template, TemplateName};
use reqwest::{Body, Method, multipart};

use crate::{Client, Error, escaped, exec::Events};

/// What a template is built from.
pub enum BuildSource {
    /// The text of a recipe.
    Recipe(String),
    /// A root file system as a tar, compressed or not.
    Tar(Body),
}

impl Client {
    pub async fn templates(&self) -> Result<Vec<Template>, Error> {
        self.json(self.request(Method::GET, "/v1/templates")).await
    }

    pub async fn template(&self, name: &TemplateName) -> Result<Template, Error> {
        self.json(self.request(Method::GET, &format!("/v1/templates/{name}"))).await
    }

    pub async fn delete_template(&self, name: &TemplateName) -> Result<(), Error> {
        self.send(self.request(Method::DELETE, &format!("/v1/templates/{name}"))).await.map(drop)
    }

    /// Answers when the build is queued; follow it with [`Client::build_log`].
    pub async fn build_template(
        &self,
        name: &TemplateName,
        source: BuildSource,
    ) -> Result<Build, Error> {
        // The name first: the server learns what the bytes are for before they come.
        let form = multipart::Form::new().text("name", name.to_string());
        let form = match source {
            BuildSource::Recipe(recipe) => form.text("recipe", recipe),
            BuildSource::Tar(tar) => {
                form.part("rootfs", multipart::Part::stream(tar).file_name("rootfs.tar"))
            }
        };
        let response = self
            .send_upload(self.request(Method::POST, "/v1/templates/build").multipart(form))
            .await?;
        self.decode(response).await
    }

    /// Newest first.
    pub async fn builds(&self) -> Result<Vec<Build>, Error> {
        self.json(self.request(Method::GET, "/v1/templates/builds")).await
    }

    pub async fn build(&self, id: &str) -> Result<Build, Error> {
        self.json(self.request(Method::GET, &format!("/v1/templates/builds/{}", escaped(id)))).await
    }

    /// The lines so far, then those to come, until the build has ended.
    pub async fn build_log(&self, id: &str) -> Result<BuildLines, Error> {
        let path = format!("/v1/templates/builds/{}/logs?follow=true", escaped(id));
        Ok(BuildLines { events: self.events(self.request(Method::GET, &path)).await? })
    }
}

pub struct BuildLines {
    events: Events,
}

impl BuildLines {
    pub async fn next(&mut self) -> Result<Option<String>, Error> {
        Ok(self.events.next().await?.filter(|event| event.name != "done").map(|event| event.data))
    }
}
