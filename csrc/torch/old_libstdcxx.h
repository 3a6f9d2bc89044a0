/* Included before everything else where a build is for an older glibc than this machine's (TURBOQUANT_GLIBC in setup.py).
 * The templates of libstdc++ are instantiated here, since an older libstdc++ does not have all those that its headers of
 * today declare to be there. */
#include <cstddef>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
