// The kernels of particles.py. Each has a function of the same meaning there, in JAX.
#include <kvblock/append_buffer.cuh>

// A row of eight float32. `number` says which particle it is, wherever it lies; below 2^24 a float
// has it exactly.
struct alignas(16) Particle {
  float x, y, z, vx, vy, vz, age, number;
};

// Particles start on a sphere, with this velocity and up to `spread` away from its center.
struct alignas(16) Config {
  float x, y, z, radius, vx, vy, vz, spread;
};

__device__ __forceinline__ unsigned Hash(unsigned bits) {
  bits = (bits ^ (bits >> 16)) * 0x7feb352du;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
  return bits ^ (bits >> 16);
}

// In [0, 1): a draw depends on the particle's number and the seed, never on the thread.
__device__ __forceinline__ float Uniform(unsigned seed, unsigned number, unsigned draw) {
  return (Hash(Hash(seed) ^ (4 * number + draw)) >> 8) * (1.0f / 16777216.0f);
}

__device__ __forceinline__ Particle Born(const Config& config, unsigned seed, unsigned number) {
  const float height = 2.0f * Uniform(seed, number, 0) - 1.0f;
  const float angle = 6.28318531f * Uniform(seed, number, 1);
  const float away = config.spread * sqrtf(Uniform(seed, number, 2));
  const float side = sqrtf(1.0f - height * height);
  const float dx = side * cosf(angle), dy = height, dz = side * sinf(angle);
  return {config.x + config.radius * dx,
          config.y + config.radius * dy,
          config.z + config.radius * dz,
          config.vx + away * dx,
          config.vy + away * dy,
          config.vz + away * dz,
          0.0f,
          static_cast<float>(number)};
}

// Appends those of the last frame that are still alive, and `rate` new ones, numbered from `first`.
extern "C" __global__ void emit(const Config* config, const Particle* last, Particle* particles,
                                unsigned* counter, unsigned count, unsigned rate, unsigned first,
                                unsigned seed, float lifetime, unsigned capacity) {
  const unsigned threads = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count + rate; i += threads) {
    if (i >= count) {
      kvblock::append(particles, counter, capacity, Born(*config, seed, first + i - count));
    } else if (last[i].age < lifetime) {
      kvblock::append(particles, counter, capacity, last[i]);
    }
  }
}

// The others have a thread for each row, and leave the rows behind the last particle alone.

extern "C" __global__ void gravity(Particle* particles, float strength, float delta_time,
                                   unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) particles[i].vy -= strength * delta_time;
}

extern "C" __global__ void drag(Particle* particles, float coefficient, float delta_time,
                                unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float kept = expf(-coefficient * delta_time);
  particles[i].vx *= kept;
  particles[i].vy *= kept;
  particles[i].vz *= kept;
}

extern "C" __global__ void integrate(Particle* particles, float delta_time, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  particles[i].x += particles[i].vx * delta_time;
  particles[i].y += particles[i].vy * delta_time;
  particles[i].z += particles[i].vz * delta_time;
  particles[i].age += delta_time;
}
