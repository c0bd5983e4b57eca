//! PEM text to what rustls takes.

use rustls_pki_types::pem::{self, PemObject as _};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// All certificates of a text, at least one.
pub fn certificates(text: &str) -> Result<Vec<CertificateDer<'static>>, pem::Error> {
    let list: Vec<_> = CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<_, _>>()?;
    if list.is_empty() {
        return Err(pem::Error::NoItemsFound);
    }
    Ok(list)
}

/// The private key of a text.
pub fn key(text: &str) -> Result<PrivateKeyDer<'static>, pem::Error> {
    PrivateKeyDer::from_pem_slice(text.as_bytes())
}
