"""The kernel of `normals_on_gpu`: each lane follows one PCG64 through NumPy's ziggurat. Importing it needs Triton."""

# pyright: reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0**-53)


@triton.jit
def _advance(high, low, add_high, add_low, by_high, by_low):
    """The next state of 128 bits, state × multiplier + increment, and the word of it: rotated right, XSL-RR."""
    upper = tl.umulhi(low, by_low) + high * by_low + low * by_high
    lower = low * by_low
    low = lower + add_low
    high = upper + add_high + (low < lower).to(tl.uint64)
    mixed, turn = high ^ low, high >> 58
    word = (mixed >> turn) | (mixed << ((64 - turn) & 63))
    return high, low, word


@triton.jit
def _uniform(word):
    """A number in [0, 1) of 53 bits."""
    return (word >> 11).to(tl.int64).to(tl.float64) * UNIT


@triton.jit
def fill_normals(out, states, inside, width, density, streams, count, LANES: tl.constexpr):
    """Write `count` numbers of each of `streams` generators to a row of `out`; `states` is (4, streams)."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = lane < streams
    high = tl.load(states + lane, mask=live, other=0).to(tl.uint64, bitcast=True)
    low = tl.load(states + streams + lane, mask=live, other=0).to(tl.uint64, bitcast=True)
    add_high = tl.load(states + 2 * streams + lane, mask=live, other=0).to(tl.uint64, bitcast=True)
    add_low = tl.load(states + 3 * streams + lane, mask=live, other=0).to(tl.uint64, bitcast=True)
    by_high = tl.full([LANES], 0x2360ED051FC65DA4, tl.uint64)
    by_low = tl.full([LANES], 0x4385DF649FCCF645, tl.uint64)
    right = tl.full([LANES], 3.6541528853610087963519472518, tl.float64)  # end of the lowest strip
    inverse = tl.full([LANES], 0.27366123732975827203338247596, tl.float64)
    row = out + lane.to(tl.int64) * count
    place = tl.where(live, 0, count)
    while tl.min(place, 0) < count:
        open_ = place < count
        high, low, word = _advance(high, low, add_high, add_low, by_high, by_low)
        strip = (word & 0xFF).to(tl.int32)
        bits = ((word >> 9) & 0xFFFFFFFFFFFFF).to(tl.int64)
        number = bits.to(tl.float64) * tl.load(width + strip)
        number = tl.where(((word >> 8) & 1) == 1, -number, number)
        done = bits < tl.load(inside + strip)
        slow = open_ & (done == 0)
        if tl.max(slow.to(tl.int32), 0) > 0:
            edge = slow & (strip > 0)
            new_high, new_low, extra = _advance(high, low, add_high, add_low, by_high, by_low)
            high, low = tl.where(edge, new_high, high), tl.where(edge, new_low, low)
            here = tl.load(density + strip)
            above = tl.load(density + tl.where(strip > 0, strip - 1, 0))
            done = done | (edge & ((above - here) * _uniform(extra) + here < tl.exp(-0.5 * number * number)))
            tail = slow & (strip == 0)
            sign = tl.where(((bits >> 8) & 1) == 1, -1.0, 1.0)
            while tl.max(tail.to(tl.int32), 0) > 0:
                first_high, first_low, first = _advance(high, low, add_high, add_low, by_high, by_low)
                next_high, next_low, second = _advance(first_high, first_low, add_high, add_low, by_high, by_low)
                high, low = tl.where(tail, next_high, high), tl.where(tail, next_low, low)
                far = -inverse * tl.log(1.0 - _uniform(first))
                down = -tl.log(1.0 - _uniform(second))
                hit = tail & (down + down > far * far)
                number = tl.where(hit, sign * (right + far), number)
                done = done | hit
                tail = tail & (hit == 0)
        write = open_ & done
        tl.store(row + place, number, mask=write)
        place = place + write.to(tl.int32)
