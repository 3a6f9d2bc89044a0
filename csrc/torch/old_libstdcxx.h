/* Included before everything else in a build for an older glibc than this machine's (TURBOQUANT_GLIBC in setup.py). It
 * makes the compiler instantiate libstdc++'s templates, because an older libstdc++ lacks some that today's headers
 * declare extern. */
#include <cstddef>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
