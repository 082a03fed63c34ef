// Angles of positions and frequencies, exact far beyond what float32 holds.
#pragma once

namespace kvblock {

// What is left of position * frequency / (2 pi) without whole turns, from -0.5 to 0.5 or a bit
// beyond. The product alone would be off by 2^-4 turns at 2^20 turns: here the frequency in turns,
// and its product with the position, are sums of two floats each (Dekker, 1971).
__device__ __forceinline__ float TurnsOf(float position, float frequency) {
  constexpr float kHigh = 0x1.45f306p-3f, kLow = 0x1.b9391p-28f;  // 1 / (2 pi), 48 bits
  const float turns = __fmul_rn(frequency, kHigh);
  const float rest = fmaf(frequency, kLow, fmaf(frequency, kHigh, -turns));
  const float whole = __fmul_rn(position, turns);
  const float part = fmaf(position, rest, fmaf(position, turns, -whole));
  return __fadd_rn(__fsub_rn(whole, rintf(whole)), part);
}

// The cosine and the sine of a position's angle, off by less than 3e-7 up to position 2^20. A
// position from 2^24 on is no float32: its digits beyond 12 bits turn on their own.
__device__ __forceinline__ float2 CosSin(int position, float frequency) {
  const float high = static_cast<float>(position & ~0xfff),
              low = static_cast<float>(position & 0xfff);
  float turns = TurnsOf(low, frequency) + TurnsOf(high, frequency);
  turns -= rintf(turns);
  float2 made;
  sincospif(2.0f * turns, &made.y, &made.x);
  return made;
}

}  // namespace kvblock
