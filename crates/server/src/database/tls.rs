//! The certificate that clients of databases see: the operator's, or one that the server makes for itself once.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use rcgen::{CertifiedKey, SanType};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio_rustls::TlsAcceptor;

use crate::{
    Error,
    whole_file::{Outlasts, write_whole},
};

/// PEM files: the chain, its own first, and the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

pub(super) struct Tls {
    pub(super) acceptor: TlsAcceptor,
    /// For clients to trust, where the certificate is the server's own.
    pub(super) own_certificate: Option<String>,
}

impl Tls {
    /// # Errors
    /// What is wrong with the operator's files.
    pub(super) async fn open(
        files: Option<&CertificateFiles>,
        directory: &Path,
        host: &str,
        address: IpAddr,
    ) -> Result<Self, Error> {
        let (chosen, directory, host) = (files.cloned(), directory.to_owned(), host.to_owned());
        let opening = move || match chosen {
            Some(files) => {
                let acceptor = acceptor(&files).map_err(|error| unusable(&files, &error))?;
                Ok(Self { acceptor, own_certificate: None })
            }
            None => {
                let files = own(&directory, &host, address).map_err(Error::internal)?;
                let acceptor = acceptor(&files).map_err(Error::internal)?;
                let text = fs::read_to_string(&files.certificate).map_err(Error::internal)?;
                Ok(Self { acceptor, own_certificate: Some(text) })
            }
        };
        tokio::task::spawn_blocking(opening).await.map_err(Error::internal)?
    }
}

fn unusable(files: &CertificateFiles, error: &io::Error) -> Error {
    Error::invalid(format!(
        "the certificate {} with the key {} cannot be used: {error}; name others with --databases-certificate and --databases-key",
        files.certificate.display(),
        files.key.display()
    ))
}

fn acceptor(files: &CertificateFiles) -> io::Result<TlsAcceptor> {
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&files.certificate)
        .and_then(|sections| sections.collect())
        .map_err(io::Error::other)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(io::Error::other)?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(io::Error::other)?;
    // Asked for by clients that begin with TLS at once.
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Made when there is none, or when it names another host.
fn own(directory: &Path, host: &str, address: IpAddr) -> io::Result<CertificateFiles> {
    let files = CertificateFiles {
        certificate: directory.join("certificate.pem"),
        key: directory.join("key.pem"),
    };
    let names = directory.join("names");
    let wanted = format!("{host}\n{address}\n");
    let is_there = fs::read_to_string(&names).is_ok_and(|text| text == wanted);
    if is_there && files.certificate.exists() && files.key.exists() {
        return Ok(files);
    }
    fs::create_dir_all(directory)?;
    let made = make(host, address).map_err(io::Error::other)?;
    // The names come last: without them it is made anew.
    write_whole(&files.key, made.signing_key.serialize_pem(), 0o600, Outlasts::Host)?;
    write_whole(&files.certificate, made.cert.pem(), 0o644, Outlasts::Host)?;
    write_whole(&names, wanted, 0o644, Outlasts::Host)?;
    Ok(files)
}

fn make(host: &str, address: IpAddr) -> Result<CertifiedKey<rcgen::KeyPair>, rcgen::Error> {
    let mut parameters = rcgen::CertificateParams::new(vec![host.to_owned()])?;
    parameters.distinguished_name.push(rcgen::DnType::CommonName, "Atoll databases");
    let address = SanType::IpAddress(address);
    if !parameters.subject_alt_names.contains(&address) {
        parameters.subject_alt_names.push(address);
    }
    let signing_key = rcgen::KeyPair::generate()?;
    let cert = parameters.self_signed(&signing_key)?;
    Ok(CertifiedKey { cert, signing_key })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_own_certificate_stays_as_long_as_its_names_do() {
        let directory = tempfile::tempdir().unwrap();
        let address = IpAddr::from([100, 64, 8, 0]);
        let text = |host: &str| {
            let files = own(directory.path(), host, address).unwrap();
            acceptor(&files).unwrap();
            fs::read_to_string(files.certificate).unwrap()
        };
        let first = text("db.example");
        assert_eq!(text("db.example"), first);
        assert_ne!(text("other.example"), first);
        assert_ne!(text("100.64.8.0"), first);
    }

    #[tokio::test]
    async fn a_certificate_that_cannot_be_read_is_told_with_the_way_out() {
        let directory = tempfile::tempdir().unwrap();
        let files = CertificateFiles {
            certificate: directory.path().join("none"),
            key: directory.path().join("none"),
        };
        let address = IpAddr::from([127, 0, 0, 1]);
        let opened = Tls::open(Some(&files), directory.path(), "h", address).await;
        assert!(opened.is_err_and(|error| error.message.contains("--databases-certificate")));
    }
}
