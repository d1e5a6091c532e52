// AVX-512's instructions in portable C (Debian's libsimde-dev), for a processor that has none of them.

#include <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#define __AVX512BW__ 1

// Such a vector is in no register, which assembler asks for in the loop that is the bound. Headers come before.
#include <cstdio>
#include <random>
#include <vector>

#include "cpu_parallel.h"
#undef __x86_64__
