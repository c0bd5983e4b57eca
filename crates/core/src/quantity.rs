//! Kubernetes quantities: `250m`, `512Mi`, `1e3`.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Why a text is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a quantity such as 250m or 512Mi")]
pub struct InvalidQuantity {
    /// The text as it was given.
    pub text: String,
}

/// Thousandths of the unit, rounded up; a cpu quantity in thousandths of a vCPU.
///
/// Suffixes as in `k8s.io/apimachinery/pkg/api/resource`. Negative values are refused: no
/// request or limit can be negative. What is too large for the type gives its largest value.
pub fn millis(quantity: &Quantity) -> Result<u64, InvalidQuantity> {
    Ok(u64::try_from(thousandths(quantity)?).unwrap_or(u64::MAX))
}

fn thousandths(quantity: &Quantity) -> Result<u128, InvalidQuantity> {
    let invalid = || InvalidQuantity {
        text: quantity.0.clone(),
    };
    let text = quantity.0.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let (mantissa, decimals) = decimal(number).ok_or_else(invalid)?;
    let factor = factor(suffix).ok_or_else(invalid)?;
    let scaled = match factor {
        Factor::Times(times) => mantissa
            .checked_mul(times)
            .and_then(|n| n.checked_mul(1000)),
        Factor::Thousandths(divisor) => mantissa.checked_mul(1000).map(|n| n.div_ceil(divisor)),
    };
    let divisor = 10u128.checked_pow(decimals).ok_or_else(invalid)?;
    Ok(scaled.ok_or_else(invalid)?.div_ceil(divisor))
}

/// Whole units, rounded up; a memory quantity in bytes.
pub fn units(quantity: &Quantity) -> Result<u64, InvalidQuantity> {
    Ok(u64::try_from(thousandths(quantity)?.div_ceil(1000)).unwrap_or(u64::MAX))
}

/// A memory quantity in MiB, rounded up.
pub fn mebibytes(quantity: &Quantity) -> Result<u64, InvalidQuantity> {
    Ok(units(quantity)?.div_ceil(1 << 20))
}

enum Factor {
    Times(u128),
    Thousandths(u128),
}

/// Digits without the point, and how many stood behind it.
fn decimal(number: &str) -> Option<(u128, u32)> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') || fraction.len() > 18 {
        return None;
    }
    let digits = format!("{whole}{fraction}");
    Some((digits.parse().ok()?, u32::try_from(fraction.len()).ok()?))
}

fn factor(suffix: &str) -> Option<Factor> {
    let times = match suffix {
        "n" => return Some(Factor::Thousandths(1_000_000_000)),
        "u" => return Some(Factor::Thousandths(1_000_000)),
        "m" => return Some(Factor::Thousandths(1_000)),
        "" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "P" => 1_000_000_000_000_000,
        "E" => 1_000_000_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "Pi" => 1 << 50,
        "Ei" => 1 << 60,
        exponent => {
            let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            let ten_to = 10u128.checked_pow(power.unsigned_abs())?;
            if power < 0 {
                return Some(Factor::Thousandths(ten_to));
            }
            ten_to
        }
    };
    Some(Factor::Times(times))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn quantity(text: &str) -> Quantity {
        Quantity(text.to_owned())
    }

    #[test]
    fn suffixes_mean_what_kubernetes_says() {
        for (text, expected) in [
            ("0", 0),
            ("1", 1000),
            ("250m", 250),
            ("0.1", 100),
            (".5", 500),
            ("1.5k", 1_500_000),
            ("1e3", 1_000_000),
            ("1E-3", 1),
            ("1u", 1), // rounded up
        ] {
            assert_eq!(millis(&quantity(text)), Ok(expected), "{text}");
        }
        assert_eq!(mebibytes(&quantity("512Mi")), Ok(512));
        assert_eq!(mebibytes(&quantity("1G")), Ok(954));
        assert_eq!(units(&quantity("1Gi")), Ok(1 << 30));
        assert_eq!(units(&quantity("15Ei")), Ok(15 << 60));
        assert_eq!(units(&quantity("16Ei")), Ok(u64::MAX));
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for text in [
            "",
            "m",
            ".",
            "-1",
            "1.2.3",
            "1Zi",
            "99999999999999999999E",
            "1e999",
            "１",
        ] {
            assert!(millis(&quantity(text)).is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_answered(text in ".{0,40}") {
            let _answered = millis(&quantity(&text)).is_ok();
        }

        #[test]
        fn larger_numbers_are_larger_quantities(a in 0u64..1 << 33, b in 0u64..1 << 33, suffix in "(m|k|Mi|)") {
            let value = |n: u64| millis(&quantity(&format!("{n}{suffix}"))).expect("in range");
            prop_assert_eq!(a <= b, value(a) <= value(b));
        }
    }
}
