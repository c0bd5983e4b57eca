//! What the API server's answers mean.

/// What was to be changed or deleted may be gone already.
pub fn absent_is_fine<T>(result: Result<T, kube::Error>) -> Result<(), kube::Error> {
    was_there(result).map(drop)
}

/// Whether what was to be changed or deleted was there.
pub fn was_there<T>(result: Result<T, kube::Error>) -> Result<bool, kube::Error> {
    match result {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}
