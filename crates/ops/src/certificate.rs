//! What is read of a certificate.

use jiff::Timestamp;
use x509_parser::pem::parse_x509_pem;

/// When the first certificate of a PEM text begins and ends; none if there is none.
pub fn validity(pem: &str) -> Option<(Timestamp, Timestamp)> {
    let (_, pem) = parse_x509_pem(pem.as_bytes()).ok()?;
    let certificate = pem.parse_x509().ok()?;
    let [from, until] = [
        certificate.validity().not_before,
        certificate.validity().not_after,
    ]
    .map(|time| Timestamp::from_second(time.timestamp()).ok());
    from.zip(until)
}
