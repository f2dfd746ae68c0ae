from tests.printed import alike


def test_the_last_digit_may_differ_and_no_other():
    assert alike("MSE 0.123 of 40, 1.5e-07", "MSE 0.124 of 40, 1.6e-07")
    assert alike("0.12345678901", "0.12345678950")
    assert not alike("MSE 0.123", "MSE 0.125")
    assert not alike("40 steps", "41 steps")
    assert not alike("R² 0.5", "r² 0.5")
    assert not alike("-0.5", "0.5")
    assert not alike("1.5e-07", "1.5e-06")
